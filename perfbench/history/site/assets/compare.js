"use strict";
// Two runs, or all runs of two commits, cell by cell; which two is in the address, as pages' names
// or commits.
(() => {
  const { element, mark, shown, shortCommit, signed, sortable, table, matcher, state, keep } = window.perfbench;
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

  // A commit of several runs is a choice, too: its value is 'commit:' and the whole commit.
  const ALL = "commit:";
  function offerCommits(select) {
    const of = new Map();
    for (const { dataset, value } of select.options) {
      if (dataset.commit) of.set(dataset.commit, [...(of.get(dataset.commit) || []), value]);
    }
    const several = [...of].filter(([, pages]) => pages.length > 1);
    if (!several.length) return;
    const group = element("optgroup", { label: "all runs of a commit" });
    group.append(...several.map(([commit, pages]) => element("option",
      { value: ALL + commit, "data-commit": commit, "data-pages": pages.join(" ") },
      `${shortCommit(commit)} · all ${pages.length} runs`)));
    select.append(group);
    document.getElementById("commits").hidden = false;
  }
  const runsOnly = (select) => [...select.options].filter((one) => !one.value.startsWith(ALL));

  // A page's name, or the beginning of a commit: then all its runs.
  function pick(select, wanted) {
    const options = [...select.options];
    const starts = (one) => one.dataset.commit.startsWith(wanted.replace(ALL, ""));
    const found = options.find((one) => one.value === wanted)
      || (wanted.replace(ALL, "").length >= 6 && (options.find((one) => one.dataset.pages && starts(one)) || options.find(starts)));
    if (found) select.value = found.value;
    return Boolean(found);
  }

  // The cells of a choice, each with its values by metric, of the newest run that has it.
  async function side(select) {
    const { value, dataset } = select.selectedOptions[0];
    const pages = dataset.pages ? dataset.pages.split(" ") : [value];
    const metrics = new Set();
    const cells = new Map();
    for (const run of await Promise.all(pages.map(load))) {
      run.metrics.forEach((name) => metrics.add(name));
      for (const [place, verdict, , ...values] of run.cells) {
        if (cells.has(place)) continue;
        const of = new Map(run.metrics.map((name, k) => [name, values[k]]));
        cells.set(place, { place, verdict, of, segment: { ...run.segment, card: known[place][3] } });
      }
    }
    return { metrics: [...metrics], cells: [...cells.values()], united: pages.length > 1 };
  }

  // 'driver 570 → 580': of what the gate calls INCOMPARABLE; empty where the two may be compared.
  function differences(from, to) {
    const names = [...new Set([...Object.keys(from), ...Object.keys(to)])].sort();
    return names.filter((name) => (from[name] || "") !== (to[name] || ""))
      .map((name) => `${name} ${from[name] || "none"} → ${to[name] || "none"}`).join(", ");
  }

  function defaults() {
    const first = b.options[0];
    b.value = first.value;
    const older = runsOnly(a).find((one, i) => i > 0 && one.dataset.suite === first.dataset.suite
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
    const whole = one.united || other.united; // then a cell is its suite's and card's
    const key = (cell) => (whole ? known[cell.place].slice(2).join("\n") : known[cell.place][4]);
    const before = new Map(one.cells.map((cell) => [key(cell), cell]));
    const after = new Map(other.cells.map((cell) => [key(cell), cell]));
    const matches = matcher(words.value);
    const made = table([["cell"], [unit ? `from, ${unit}` : "from", "number"], [unit ? `to, ${unit}` : "to", "number"], ["change", "number"], ["its 95 %", "number"], ["verdicts"]], "comparison");
    const counts = { apart: 0, cells: 0, alone: 0, bounded: 0, bare: 0, differing: 0 };
    const differing = new Map();
    for (const both of new Set([...before.keys(), ...after.keys()])) {
      const [from, to] = [before.get(both), after.get(both)];
      const [file, text, suite, card, id] = known[(to || from).place];
      const terms = `\n${id.toLowerCase().split(",").join("\n")}\nsuite=${suite.toLowerCase()}\ncard=${card.toLowerCase()}\n`;
      if (!matches(terms, `${text} ${suite} ${card}`)) continue;
      const nothing = [null, null, null];
      const [x, y] = [from?.of.get(name) || nothing, to?.of.get(name) || nothing];
      const apartBy = from && to ? differences(from.segment, to.segment) : "";
      if (apartBy) differing.set(apartBy, (differing.get(apartBy) || 0) + 1);
      const moved = apartBy ? null : change(x, y);
      const apart = moved && moved.low !== null && (moved.low > 0 || moved.high < 0);
      const worse = better === "neither" || !apart ? "" : (moved.pct < 0) === (better === "higher") ? "worse" : "better";
      counts.cells += 1;
      counts.apart += Boolean(apart);
      counts.alone += !(from && to);
      if (moved) counts[moved.low === null ? "bare" : "bounded"] += 1;
      counts.differing += Boolean(moved && moved.low === null && x[0] !== y[0]);
      const arrow = worse === "worse" ? "▼ " : worse === "better" ? "▲ " : "";
      made.body.append(element("tr", {},
        element("td", { class: "name" }, element("a", { href: `cells/${file}.html`, title: id }, text)),
        element("td", { class: "number", "data-value": x[0] ?? "-" }, interval(x)),
        element("td", { class: "number", "data-value": y[0] ?? "-" }, interval(y)),
        element("td", { class: "number", "data-value": moved ? moved.pct : "-" },
          moved ? element("span", { class: `judged ${worse}` }, arrow + signed(moved.pct, 2)) : "-",
          apartBy ? element("span", { class: "quiet", title: apartBy }, " not comparable") : null),
        element("td", { class: "number quiet" }, moved && moved.low !== null ? `${signed(moved.low)} to ${signed(moved.high)}` : "-"),
        element("td", {}, from ? mark(from.verdict) : "absent", " → ", to ? mark(to.verdict) : "absent")));
    }
    sortable(made.table);
    place.replaceChildren(made.box);
    const alone = counts.alone ? `, ${counts.alone} in only one of the runs` : "";
    const reasons = [...differing].map(([text, count]) => `${count} not comparable (${text})`);
    const judged = `${counts.apart} of ${counts.cells - counts.bare} cells changed by more than the interval`;
    const bare = `no interval: ${counts.differing} of ${counts.bare} cells differ`;
    const counted = !counts.bare ? judged : !counts.bounded ? bare : `${judged}; ${bare}`;
    summary.textContent = [counted + alone, ...reasons].join("; ") + ".";
  }

  async function show() {
    try {
      const [one, other] = await Promise.all([side(a), side(b)]);
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
  [a, b].forEach(offerCommits);
  read();
})();
