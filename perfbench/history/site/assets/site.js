"use strict";
// What all pages share: the theme, elements, sortable tables, the filter's words, the address.
window.perfbench = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const { lights, letters } = window.perfbenchShared;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");

  function onTheme(act) {
    document.addEventListener("perfbench-theme", act);
    dark.addEventListener("change", act);
  }

  // Text goes in as text: nothing that a run holds becomes markup.
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((one) => one !== null));
    return made;
  }

  const lightOf = (verdict) => (verdict === null || verdict === "MEASURED" ? "none" : lights[verdict] || "red");

  function mark(verdict) {
    const light = lightOf(verdict);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 20 20");
    svg.setAttribute("aria-hidden", "true");
    const use = document.createElementNS(SVG, "use");
    use.setAttribute("href", `#shape-${light}`);
    const text = document.createElementNS(SVG, "text");
    text.setAttribute("x", 10);
    text.setAttribute("y", 14.5);
    text.textContent = light === "none" ? "–" : letters[verdict] || "*";
    svg.append(use, text);
    return element("span", { class: `mark ${light}` }, svg, element("span", {}, verdict || "MEASURED"));
  }

  // Four significant digits, as the pages that Python wrote.
  function shown(value, unit = "") {
    if (value === null || value === undefined) return "-";
    const text = Math.abs(value) >= 1000
      ? Math.round(value).toLocaleString("en-US")
      : String(Number(value.toPrecision(4)));
    return unit ? `${text} ${unit}` : text;
  }

  const { commitChars } = window.perfbenchShared;
  const shortCommit = (commit) => (commit ? commit.slice(0, commitChars) : "?");

  // As perfbench.history.interval.half_width_pct.
  const halfPct = (value, low, high) => (!value || low === null || high === null
    ? null : 100 * Math.max(high - value, value - low) / Math.abs(value));

  const minute = (ms) => new Date(ms).toISOString().slice(0, 16).replace("T", " ");

  const signed = (pct, digits = 1) => `${pct >= 0 ? "+" : "−"}${Math.abs(pct).toFixed(digits)} %`;

  function sortKey(row, column) {
    const cell = row.cells[column];
    if (!cell) return "";
    const text = (cell.dataset.value ?? cell.textContent).trim();
    const found = /^[+-]?[\d.,]+(e[+-]?\d+)?/i.exec(text.replace("−", "-"));
    if (!found || /^\d{4}-/.test(text)) return text === "-" ? null : text.toLowerCase();
    return Number(found[0].replaceAll(",", ""));
  }

  function compareKeys(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = element("button", { type: "button" }, ...head.childNodes);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row, column), row]);
        rows.sort(([a], [b]) => (a === null || b === null ? compareKeys(a, b) : way * compareKeys(a, b)));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }

  function table(heads, label) {
    const body = element("tbody");
    const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", { class: kind }, text)));
    const made = element("table", { class: "sortable" }, element("thead", {}, head), body);
    const box = element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, made);
    return { box, body, table: made };
  }

  // "path=tri* -decode 'two words'": words that must all match; see the help on the overview.
  function matcher(words) {
    const found = words.toLowerCase().match(/-?(?:[^\s"']+|"[^"]*"|'[^']*')+/g) || [];
    const wanted = found.map((word) => {
      const not = word.startsWith("-") && word.length > 1;
      const text = word.slice(not ? 1 : 0).replace(/["']/g, "");
      const exact = /^[\w.-]+=/.test(text);
      const pattern = exact
        ? new RegExp(`\n${text.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replaceAll("*", "[^\n]*")}\n`)
        : null;
      return { not, test: (terms, all) => (exact ? pattern.test(terms) : all.includes(text)) };
    });
    return (terms, text) => {
      const all = `${terms} ${text.toLowerCase()}`;
      return wanted.every(({ not, test }) => test(terms, all) !== not);
    };
  }

  const state = () => new URLSearchParams(location.hash.slice(1));

  function keep(changed) {
    const now = state();
    for (const [key, value] of Object.entries(changed)) value ? now.set(key, value) : now.delete(key);
    const text = now.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }

  function ages() {
    for (const one of document.querySelectorAll(".age")) {
      const hours = (Date.now() - Date.parse(one.dataset.time)) / 3.6e6;
      if (!(hours >= 0)) continue;
      one.textContent = hours < 48 ? `, ${Math.round(hours)} h ago` : `, ${Math.round(hours / 24)} days ago`;
    }
  }

  function selectText(node) {
    const range = document.createRange();
    range.selectNodeContents(node);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch { // no clipboard outside of secure pages: selected, it is one key away
      selectText(code);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  document.getElementById("theme").addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("perfbench-theme", next); } catch { /* storage is turned off */ }
    document.dispatchEvent(new Event("perfbench-theme"));
  });
  document.querySelectorAll("table.sortable").forEach(sortable);
  ages();
  return { theme, onTheme, element, lightOf, mark, halfPct, shortCommit, shown, minute, signed, sortable, table, matcher, state, keep };
})();
