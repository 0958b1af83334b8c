"use strict";
// A run's page: the table of its cells, worst first.
(() => {
  const { element, halfPct, lightOf, mark, shown, sortable, table } = window.perfbench;
  const { page, metrics } = JSON.parse(document.getElementById("data").textContent);
  const known = window.perfbenchCells;
  const { cells } = window.perfbenchRuns[page];
  const ORDER = ["red", "blind", "green", "none"];
  const heads = [["verdict"], ["cell"], ...metrics.map((one) => [one.unit ? `${one.title}, ${one.unit}` : one.title, "number"]), ["reason"]];
  const made = table(heads, "cells of this run");
  const ranked = [...cells].sort((a, b) => ORDER.indexOf(lightOf(a[1])) - ORDER.indexOf(lightOf(b[1])));
  for (const [place, verdict, reason, ...values] of ranked) {
    const [file, name, , , id] = known[place];
    made.body.append(element("tr", {},
      element("td", {}, mark(verdict)),
      element("td", { class: "name" }, element("a", { href: `../cells/${file}.html`, title: id }, name)),
      ...values.map(([value, low, high]) => {
        const half = halfPct(value, low, high);
        const band = half ? element("span", { class: "quiet" }, ` ± ${half.toFixed(1)} %`) : null;
        return element("td", { class: "number", "data-value": value ?? "-" }, shown(value), band);
      }),
      element("td", {}, element("span", { class: "reason" }, reason))));
  }
  sortable(made.table);
  document.getElementById("table").append(made.box);
})();
