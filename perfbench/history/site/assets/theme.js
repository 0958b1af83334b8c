"use strict";
// Before the first paint: what the reader chose last, else what the system prefers.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("perfbench-theme"); } catch { /* storage is turned off */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
