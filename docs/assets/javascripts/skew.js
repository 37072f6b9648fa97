/* Slider over the recorded skew sweep: how busy the busiest rank is, for a few ways to place and schedule. */
(function () {
  "use strict";
  const SHOWN = [
    ["plain", "no replicas"],
    ["merged", "two replicas, equal sets"],
    ["eplb_style_stale", "EPLB-style, stale loads"],
    ["symmetric", "symmetric + scheduling"],
    ["asymmetric_stale", "asymmetric + scheduling, stale loads"],
  ];
  for (const box of document.querySelectorAll('[data-widget="skew"]')) {
    const sweep = JSON.parse(box.querySelector("script").textContent);
    const most = Math.max(...sweep.map((row) => Math.max(...SHOWN.map(([key]) => row[key].mean))));
    const x = (ratio) => 240 + (ratio * 330) / most;
    const body = document.createElement("div");
    body.innerHTML =
      '<label>Zipf exponent s <input type="range" min="0" max="' + (sweep.length - 1) + '" value="2" step="1"></label>' +
      '<output></output><svg viewBox="0 0 640 150" width="640" role="img"></svg><p class="said" aria-live="polite"></p>';
    box.append(body);
    const input = body.querySelector("input");
    function draw() {
      const row = sweep[Number(input.value)];
      body.querySelector("output").textContent = "s = " + row.zipf;
      input.setAttribute("aria-valuetext", "s = " + row.zipf);
      const bars = SHOWN.map(([key, label], i) => {
        const ratio = row[key].mean;
        const colour = ratio < 1.01 ? "#2a9d8f" : "#e4572e";
        return (
          `<text x="230" y="${i * 26 + 24}" text-anchor="end">${label}</text>` +
          `<rect x="240" y="${i * 26 + 10}" width="${x(ratio) - 240}" height="20" fill="${colour}"></rect>` +
          `<text x="${x(ratio) + 6}" y="${i * 26 + 24}">${ratio.toFixed(3)}</text>`
        );
      });
      const one = x(1);
      body.querySelector("svg").innerHTML =
        bars.join("") + `<line x1="${one}" x2="${one}" y1="4" y2="142" stroke="currentColor" stroke-dasharray="3 3"></line>`;
      const wait = (name) => `${Math.round((1 - 1 / row[name].mean) * 100)} %`;
      body.querySelector(".said").textContent =
        `At s = ${row.zipf} an average rank waits ${wait("plain")} of the time without replicas, and ` +
        `${wait("symmetric")} with two replicas, a symmetric placement and scheduling.`;
    }
    input.addEventListener("input", draw);
    draw();
  }
})();
