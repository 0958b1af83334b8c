"use strict";
// A cell's page: its charts, drawn when they come into view; hover, keys and taps; all runs.
(() => {
  const { element, mark, shown, shortCommit, minute, signed, sortable, table, state, keep, onTheme } = window.perfbench;
  const { draw, nearest, xOf } = window.perfbenchChart;
  const data = JSON.parse(document.getElementById("data").textContent);
  const { runs, metrics, peers } = data;
  const tip = document.getElementById("tip");
  const boxes = document.getElementById("charts");
  const controls = document.getElementById("controls");
  const drawable = metrics.filter((one) => one.value.some((value) => value !== null));
  const charts = [];
  let axis = state().get("x") === "order" ? "order" : "time";
  let chosen = new Set((state().get("peers") || "").split(";").filter(Boolean));

  for (const stamp of document.querySelectorAll("time[data-ms]")) stamp.textContent = minute(Number(stamp.dataset.ms));

  const indexOf = (one, i) => (one.at ? one.at.indexOf(i) : i);

  function describe(one, i) {
    const k = indexOf(one, i);
    const value = one.value[k];
    const lines = [element("div", {}, element("strong", {}, value === null ? "no value" : shown(value, one.unit)))];
    if (value !== null && one.low.length && one.low[k] !== null) {
      const count = one.count[k] ? `, ${one.count[k]} processes` : "";
      lines.push(element("div", {}, `95 %: ${shown(one.low[k])} to ${shown(one.high[k], one.unit)}${count}`));
    }
    const verdict = runs.verdicts[runs.verdict[i]];
    lines.push(element("div", {}, mark(verdict)));
    const reason = one.why[i] || runs.reasons[runs.reason[i]];
    if (reason) lines.push(element("div", { class: "quiet" }, reason.length > 200 ? `${reason.slice(0, 200)}…` : reason));
    for (const change of one.changes.filter((c) => c.i === i)) {
      lines.push(element("div", {}, `${change.kind} ${signed(change.pct)} (${signed(change.low)} to ${signed(change.high)})`));
      if (change.decided) lines.push(element("div", {}, change.decided));
    }
    for (const row of one.accepted.filter((c) => c.i === i)) lines.push(element("div", {}, `${row.kind}: ${row.text}`));
    for (const row of runs.segments.filter((c) => c.i === i)) lines.push(element("div", {}, row.text));
    const commit = element("code", {}, shortCommit(runs.commit[i]));
    lines.push(element("div", { class: "quiet" }, `${minute(runs.time[i])}, commit `, commit));
    lines.push(element("div", { class: "quiet" }, "run ", element("code", { class: "wrap" }, runs.id[i])));
    return lines;
  }

  // The value of the newest run; where it has none, why, and the value before it with its date.
  function newestOf(one) {
    const at = (k) => (one.at ? one.at[k] : k);
    const last = one.value.findLastIndex((value) => value !== null);
    const value = `${shown(one.value[last], one.unit)}`;
    const newest = runs.time.length - 1;
    if (at(last) === newest) return value;
    const verdict = runs.verdicts[runs.verdict[newest]];
    const absent = one.why[newest] !== undefined || verdict !== "MEASURED";
    const why = absent ? `${verdict}: ${one.why[newest] || runs.reasons[runs.reason[newest]] || "no value"}` : "no value";
    return `- (${why.slice(0, 80)}); ${value} on ${minute(runs.time[at(last)])}`;
  }

  function select(chart, point, y) {
    for (const other of charts) {
      if (other === chart || !other.drawn || other.hovered === -1) continue;
      other.hovered = -1;
      other.drawn.view.signal("hovered", -1).runAsync();
    }
    if (chart.hovered !== point.i) {
      chart.hovered = point.i;
      chart.drawn.view.signal("hovered", point.i).runAsync();
      tip.replaceChildren(...describe(chart.one, point.i));
    }
    tip.hidden = false;
    const x = xOf(chart.drawn, axis, point, chart.box);
    const size = tip.getBoundingClientRect();
    const left = x + 16 + size.width > innerWidth - 8 ? x - 16 - size.width : x + 16;
    tip.style.left = `${Math.min(Math.max(8, left), Math.max(8, innerWidth - size.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 12, innerHeight - size.height - 8))}px`;
  }

  function leave(chart) {
    tip.hidden = true;
    if (!chart.drawn || chart.hovered === -1) return;
    chart.hovered = -1;
    chart.drawn.view.signal("hovered", -1).runAsync();
  }

  const open = (i) => { location.href = `../runs/${runs.page[i]}.html`; };

  function step(chart, way) {
    const { points } = chart.drawn;
    const ordered = [...points].sort((a, b) => a[axis] - b[axis]);
    const at = ordered.findIndex((point) => point.i === chart.hovered);
    const next = at < 0 ? ordered.length - 1 : Math.min(Math.max(0, at + way), ordered.length - 1);
    select(chart, ordered[next], chart.box.getBoundingClientRect().top + 30);
  }

  function listen(chart) {
    const { box } = chart;
    let touched = false;
    box.addEventListener("pointermove", (event) => {
      if (!chart.drawn || event.pointerType === "touch") return;
      select(chart, nearest(chart.drawn, axis, event.clientX, box), event.clientY);
    });
    box.addEventListener("pointerdown", (event) => { touched = event.pointerType === "touch"; });
    box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") leave(chart); });
    box.addEventListener("click", (event) => {
      if (!chart.drawn) return;
      const point = nearest(chart.drawn, axis, event.clientX, box);
      if (touched && chart.hovered !== point.i) select(chart, point, event.clientY); // a second tap opens it
      else open(point.i);
    });
    box.addEventListener("keydown", (event) => {
      if (!chart.drawn) return;
      const ways = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
      if (event.key in ways) step(chart, ways[event.key]);
      else if (event.key === "Enter" && chart.hovered >= 0) open(chart.hovered);
      else if (event.key === "Escape") leave(chart);
      else return;
      event.preventDefault();
    });
    box.addEventListener("blur", () => leave(chart));
  }

  async function redraw(chart) {
    const turn = ++chart.turn;
    const before = chart.drawn;
    const others = chart.main ? peers.filter((peer) => chosen.has(peer.name)) : [];
    const drawn = await draw(chart.box, runs, chart.one, { axis, others });
    if (turn !== chart.turn) { drawn.finalize(); return; }
    before?.finalize();
    chart.drawn = drawn;
    chart.hovered = -1;
    chart.box.dataset.drawn = axis;
  }

  const redrawAll = () => charts.filter((chart) => chart.seen).forEach(redraw);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      const chart = charts.find((one) => one.box === entry.target);
      seen.unobserve(chart.box);
      chart.seen = true;
      redraw(chart);
    }
  }, { rootMargin: "200px" });

  drawable.forEach((one, place) => {
    const title = one.unit ? `${one.title} (${one.unit})` : one.title;
    const label = `${title} over ${one.value.length} runs: left and right move from run to run, Enter opens it`;
    const box = element("div", { class: "chart", tabindex: 0, role: "group", "aria-label": label, "data-metric": one.name });
    const newest = element("span", {}, newestOf(one));
    boxes.append(element("figure", { class: place ? null : "main" }, element("figcaption", {}, title, newest), box));
    const chart = { one, box, main: place === 0, drawn: null, hovered: -1, turn: 0, seen: false };
    charts.push(chart);
    listen(chart);
    seen.observe(box);
  });
  const missing = metrics.filter((one) => !drawable.includes(one));
  if (missing.length) {
    const list = missing.map((one) => `${one.title}: ${Object.values(one.why).at(-1) || "no value"}`);
    boxes.after(element("p", { class: "quiet" }, `Without a value: ${list.join("; ")}.`));
  }

  for (const input of controls.elements.axis) {
    input.checked = input.value === axis;
    input.addEventListener("change", () => {
      axis = input.value;
      keep({ x: axis === "time" ? "" : axis });
      redrawAll();
    });
  }
  const fieldset = document.getElementById("peers");
  fieldset.hidden = peers.length === 0 || drawable.length === 0;
  for (const peer of peers) {
    const input = element("input", { type: "checkbox" });
    input.checked = chosen.has(peer.name);
    input.addEventListener("change", () => {
      chosen = new Set([...chosen].filter((name) => name !== peer.name));
      if (input.checked) chosen.add(peer.name);
      keep({ peers: [...chosen].join(";") });
      charts.filter((chart) => chart.main && chart.seen).forEach(redraw);
    });
    fieldset.append(element("label", {}, input, element("span", {}, peer.name)));
  }
  onTheme(redrawAll);

  const all = document.getElementById("all");
  all.addEventListener("toggle", () => {
    if (!all.open || all.querySelector("table")) return;
    const one = drawable[0] || metrics[0];
    const made = table([["run"], ["commit"], [one.title, "number"], ["95 %", "number"], ["verdict"], ["reason"]], "all runs");
    for (let i = runs.time.length - 1; i >= 0; i -= 1) {
      const k = indexOf(one, i);
      const band = k >= 0 && one.low.length && one.low[k] !== null ? `${shown(one.low[k])} to ${shown(one.high[k])}` : "-";
      made.body.append(element("tr", {},
        element("td", {}, element("a", { href: `../runs/${runs.page[i]}.html` }, minute(runs.time[i]))),
        element("td", {}, element("code", {}, shortCommit(runs.commit[i]))),
        element("td", { class: "number" }, k >= 0 ? shown(one.value[k], one.unit) : "-"),
        element("td", { class: "number" }, band),
        element("td", {}, mark(runs.verdicts[runs.verdict[i]])),
        element("td", { class: "reason" }, runs.reasons[runs.reason[i]])));
    }
    sortable(made.table);
    all.append(made.box);
  });
})();
