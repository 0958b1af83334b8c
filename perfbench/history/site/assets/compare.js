"use strict";
// Two runs, cell by cell; which two is in the address, as pages' names or commits.
(() => {
  const { element, mark, shown, signed, sortable, table, matcher, state, keep } = window.perfbench;
  const titles = JSON.parse(document.getElementById("data").textContent);
  const known = window.perfbenchCells;
  const [a, b, metric, words] = ["a", "b", "metric", "words"].map((id) => document.getElementById(id));
  const summary = document.getElementById("summary");
  const place = document.getElementById("table");
  if (a.options.length < 2) return;

  const loading = new Map();
  function load(page) {
    if (!loading.has(page)) {
      loading.set(page, new Promise((resolve, reject) => {
        const script = element("script", { src: `data/${page}.js` });
        script.addEventListener("load", () => resolve(window.perfbenchRuns[page]));
        script.addEventListener("error", () => reject(new Error(`data/${page}.js is not there`)));
        document.head.append(script);
      }));
    }
    return loading.get(page);
  }

  // A page's name, or the beginning of a commit: then its newest run.
  function pick(select, wanted) {
    const options = [...select.options];
    const found = options.find((one) => one.value === wanted)
      || (wanted && wanted.length >= 6 && options.find((one) => one.dataset.commit.startsWith(wanted)));
    if (found) select.value = found.value;
    return Boolean(found);
  }

  function defaults() {
    const first = b.options[0];
    b.value = first.value;
    const older = [...a.options].find((one, i) => i > 0 && one.dataset.suite === first.dataset.suite
      && one.dataset.card === first.dataset.card);
    a.value = (older || a.options[1]).value;
  }

  const half = ([, low, high]) => (low > 0 && high > 0 ? Math.log(high / low) / 2 : null);

  function change(from, to) {
    if (!(from[0] > 0) || !(to[0] > 0)) return null;
    const [mine, theirs] = [half(from), half(to)];
    const middle = Math.log(to[0] / from[0]);
    const pct = (x) => 100 * (Math.exp(x) - 1);
    if (mine === null || theirs === null) return { pct: pct(middle), low: null, high: null };
    const width = Math.hypot(mine, theirs);
    return { pct: pct(middle), low: pct(middle - width), high: pct(middle + width) };
  }

  const interval = ([value, low, high]) =>
    (value === null ? "-" : low === null || low === high ? shown(value) : `${shown(value)} (${shown(low)} to ${shown(high)})`);

  function fill(one, other) {
    const name = metric.value;
    const { unit, better } = titles[name] || { unit: "", better: "neither" };
    const [k, l] = [one.metrics.indexOf(name), other.metrics.indexOf(name)];
    const key = (cell) => known[cell[0]][4];
    const before = new Map(one.cells.map((cell) => [key(cell), cell]));
    const after = new Map(other.cells.map((cell) => [key(cell), cell]));
    const matches = matcher(words.value);
    const made = table([["cell"], [unit ? `from, ${unit}` : "from", "number"], [unit ? `to, ${unit}` : "to", "number"], ["change", "number"], ["its 95 %", "number"], ["verdicts"]], "comparison");
    const counts = { apart: 0, cells: 0, alone: 0 };
    for (const id of new Set([...before.keys(), ...after.keys()])) {
      const [from, to] = [before.get(id), after.get(id)];
      const [file, text, suite, card] = known[(to || from)[0]];
      const terms = `\n${id.toLowerCase().split(",").join("\n")}\nsuite=${suite.toLowerCase()}\ncard=${card.toLowerCase()}\n`;
      if (!matches(terms, `${text} ${suite} ${card}`)) continue;
      const [x, y] = [from && k >= 0 ? from[3 + k] : [null, null, null], to && l >= 0 ? to[3 + l] : [null, null, null]];
      const moved = change(x, y);
      const apart = moved && moved.low !== null && (moved.low > 0 || moved.high < 0);
      const worse = better === "neither" || !apart ? "" : (moved.pct < 0) === (better === "higher") ? "worse" : "better";
      counts.cells += 1;
      counts.apart += Boolean(apart);
      counts.alone += !(from && to);
      const arrow = worse === "worse" ? "▼ " : worse === "better" ? "▲ " : "";
      made.body.append(element("tr", {},
        element("td", { class: "name" }, element("a", { href: `cells/${file}.html`, title: id }, text)),
        element("td", { class: "number", "data-value": x[0] ?? "-" }, interval(x)),
        element("td", { class: "number", "data-value": y[0] ?? "-" }, interval(y)),
        element("td", { class: "number", "data-value": moved ? moved.pct : "-" },
          moved ? element("span", { class: `judged ${worse}` }, arrow + signed(moved.pct, 2)) : "-"),
        element("td", { class: "number quiet" }, moved && moved.low !== null ? `${signed(moved.low)} to ${signed(moved.high)}` : "-"),
        element("td", {}, from ? mark(from[1]) : "absent", " → ", to ? mark(to[1]) : "absent")));
    }
    sortable(made.table);
    place.replaceChildren(made.box);
    const alone = counts.alone ? `, ${counts.alone} in only one of the runs` : "";
    summary.textContent = `${counts.apart} of ${counts.cells} cells changed by more than the interval${alone}.`;
  }

  async function show() {
    try {
      const [one, other] = await Promise.all([load(a.value), load(b.value)]);
      const before = metric.value || state().get("metric");
      const names = [...new Set([...other.metrics, ...one.metrics])];
      metric.replaceChildren(...names.map((name) => element("option", { value: name }, (titles[name] || { title: name }).title)));
      if (names.includes(before)) metric.value = before;
      fill(one, other);
    } catch (error) {
      summary.textContent = `${error.message}: this run's data was not published.`;
      place.replaceChildren();
    }
  }

  function read() {
    defaults();
    const now = state();
    const lost = ["a", "b"].filter((side) => now.get(side) && !pick(side === "a" ? a : b, now.get(side)));
    words.value = now.get("q") || "";
    if (now.get("metric")) metric.value = now.get("metric");
    show().then(() => {
      if (lost.length) summary.textContent += ` The address names a run that is not here (${lost.join(", ")}): the default stands for it.`;
    });
  }

  const kept = () => keep({ a: a.value, b: b.value, metric: metric.value === "tok_per_s" ? "" : metric.value, q: words.value.trim() });
  for (const one of [a, b, metric, words]) {
    one.addEventListener(one === words ? "input" : "change", () => { kept(); show(); });
  }
  document.getElementById("pick").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("swap").addEventListener("click", () => {
    [a.value, b.value] = [b.value, a.value];
    kept();
    show();
  });
  addEventListener("hashchange", read);
  read();
})();
