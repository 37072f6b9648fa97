/* Maths, diagrams and the two interactive figures. Plain scripts: they must work from file://, without a network. */
(function () {
  "use strict";
  const here = document.currentScript.src;
  const vendor = new URL("../vendor/", here).href;

  function loadScript(src) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = src;
      script.onload = resolve;
      script.onerror = () => reject(new Error("cannot load " + src));
      document.head.appendChild(script);
    });
  }

  function maths() {
    renderMathInElement(document.body, {
      delimiters: [
        { left: "\\(", right: "\\)", display: false },
        { left: "\\[", right: "\\]", display: true },
      ],
      throwOnError: true,
    });
  }

  /* Mermaid is large, so only pages with a diagram load it. */
  async function diagrams() {
    const blocks = [...document.querySelectorAll("pre.diagram")];
    if (blocks.length === 0) return;
    await loadScript(vendor + "mermaid/mermaid.min.js");
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", fontFamily: "inherit" });
    for (const [i, block] of blocks.entries()) {
      const { svg } = await mermaid.render("diagram-" + i, block.textContent);
      const figure = document.createElement("div");
      figure.className = "diagram-drawn";
      figure.innerHTML = svg;
      block.replaceWith(figure);
    }
  }

  async function start() {
    maths();
    await diagrams();
    for (const name of ["heap", "skew"]) {
      if (document.querySelector(`[data-widget="${name}"]`) !== null) {
        await loadScript(new URL(name + ".js", here).href);
      }
    }
    document.documentElement.setAttribute("data-site-ready", "");
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
