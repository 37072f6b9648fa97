/* Step through the rows that two ranks write into the heap of rank 0, in the compact and in the fixed layout. */
(function () {
  "use strict";
  const TILE = 4, CAPACITY = 4, SLOTS = 2;
  const COUNTS = [[3, 1], [2, 2]]; // rows of source p for slot x of rank 0
  const COLOURS = ["#3f51b5", "#e4572e"];
  // Any order will do: that is the point.
  const ORDER = [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 0, 2]];
  const tiles = [0, 1].map((x) => Math.ceil((COUNTS[0][x] + COUNTS[1][x]) / TILE));

  function compact(p, x, i) {
    const start = x === 0 ? 0 : tiles[0];
    const before = p === 0 ? 0 : COUNTS[0][x];
    return { row: start * TILE + before + i, text: `tile_start ${start} × ${TILE} + rows_before ${before} + index ${i}` };
  }
  function fixed(p, x, i) {
    return { row: (p * SLOTS + x) * CAPACITY + i, text: `(source ${p} × ${SLOTS} + slot ${x}) × ${CAPACITY} + index ${i} (round and side left out)` };
  }

  for (const box of document.querySelectorAll('[data-widget="heap"]')) {
    const body = document.createElement("div");
    const name = "heap-layout-" + Math.random().toString(36).slice(2);
    body.innerHTML =
      `<label><input type="radio" name="${name}" value="compact" checked> compact</label>` +
      `<label><input type="radio" name="${name}" value="fixed"> fixed</label>` +
      "<button>Back</button><button>Next</button>" +
      '<svg viewBox="0 0 640 110" width="640" role="img"></svg><p class="said" aria-live="polite"></p>';
    box.append(body);
    const [back, next] = body.querySelectorAll("button");
    let step = 0;
    function draw() {
      const layout = body.querySelector("input:checked").value;
      const address = layout === "compact" ? compact : fixed;
      const rows = layout === "compact" ? (tiles[0] + tiles[1]) * TILE : 2 * SLOTS * CAPACITY;
      const cells = [];
      for (let r = 0; r < rows; r++) {
        cells.push(
          `<rect x="${10 + r * 38}" y="30" width="34" height="34" fill="none" stroke="currentColor" stroke-opacity="0.4"></rect>` +
          `<text x="${27 + r * 38}" y="80" text-anchor="middle">${r}</text>`);
      }
      ORDER.slice(0, step).forEach(([p, x, i], n) => {
        const at = address(p, x, i).row;
        const last = n === step - 1 ? ' stroke="currentColor" stroke-width="3"' : "";
        cells.push(
          `<rect x="${10 + at * 38}" y="30" width="34" height="34" fill="${COLOURS[p]}"${last}></rect>` +
          `<text x="${27 + at * 38}" y="52" text-anchor="middle" style="fill:#fff">${p}·${x}</text>`);
      });
      for (let t = 0; t < rows / TILE; t++) {
        const label = layout === "compact" ? `slot ${t < tiles[0] ? 0 : 1}, tile ${t}` : `source ${Math.floor(t / SLOTS)}, slot ${t % SLOTS}`;
        cells.push(
          `<line x1="${8 + t * TILE * 38}" x2="${8 + t * TILE * 38}" y1="20" y2="70" stroke="currentColor" stroke-width="2"></line>` +
          `<text x="${12 + t * TILE * 38}" y="20">${label}</text>`);
      }
      const used = ORDER.length;
      body.querySelector("svg").innerHTML = cells.join("") + `<text x="10" y="102">heap rows of rank 0; p·x = row of source p for slot x</text>`;
      let said = "Two ranks have rows for the two experts of rank 0: rank 0 has 3 and 1, rank 1 has 2 and 2. Press Next.";
      if (step > 0) {
        const [p, x, i] = ORDER[step - 1];
        const a = address(p, x, i);
        said = `Step ${step}: rank ${p} writes its row ${i} for slot ${x} at ${a.text} = row ${a.row}.`;
      }
      if (step === ORDER.length) said += ` Done: ${used} of ${rows} rows hold data, in ${rows / TILE} tiles, and no row was written twice.`;
      body.querySelector(".said").textContent = said;
      back.disabled = step === 0;
      next.disabled = step === ORDER.length;
    }
    back.addEventListener("click", () => { step -= 1; draw(); if (back.disabled) next.focus(); });
    next.addEventListener("click", () => { step += 1; draw(); if (next.disabled) back.focus(); });
    body.querySelectorAll("input").forEach((input) => input.addEventListener("change", draw));
    draw();
  }
})();
