"use strict";
// Draws a series with the specification that Python's PNGs are drawn with, and finds the run under
// the pointer.
window.perfbenchChart = (() => {
  const { theme, lightOf, signed } = window.perfbench;
  const { specs, maxFew, hoursBelowDays } = window.perfbenchShared;
  const JUDGED = new Map([[true, "worse"], [false, "better"], [null, "neither"]]);

  // As perfbench.history.site.charts.datasets.
  function datasets(runs, one, others) {
    const last = Math.max(1, runs.time.length - 1);
    const at = one.at || [...runs.time.keys()];
    const place = (i, suffix = "") => ({ [`time${suffix}`]: runs.time[i], [`order${suffix}`]: runs.order[i] });
    const points = at.map((i, k) => ({
      i, ...place(i), value: one.value[k],
      low: one.low.length ? one.low[k] : null, high: one.high.length ? one.high[k] : null,
      light: lightOf(runs.verdicts[runs.verdict[i]]), fresh: runs.fresh[i],
    }));
    const marked = (kind) => one.changes.filter((change) => change.kind === kind);
    return {
      points,
      drifts: marked("drift").map((c) => ({ ...place(c.from), ...place(c.i, "2"), judged: JUDGED.get(c.worse) })),
      steps: marked("step").map((c) => ({ ...place(c.i), judged: JUDGED.get(c.worse) })),
      labels: one.changes.map((c) => ({
        ...place(c.i), judged: JUDGED.get(c.worse), late: Number(c.i > 0.8 * last),
        text: `${c.kind === "drift" ? "drift " : ""}${signed(c.pct)}`,
      })),
      segments: runs.segments.map((row) => ({
        ...place(row.i), text: row.short, late: Number(row.i > 0.8 * last),
      })),
      levels: one.levels.map((row) => ({ ...place(row.i), ...place(row.to, "2"), level: row.level })),
      accepted: one.accepted.filter((row) => row.kind === "accepted").map((row) => place(row.i)),
      baseline: one.baseline === null ? [] : [{ level: one.baseline }],
      others: others.flatMap((peer) => peer.value.map((value, i) => ({ name: peer.name, value, ...place(i) }))),
    };
  }

  // As perfbench.history.site.charts.parameters.
  function parameters(runs) {
    const span = Math.max(...runs.time) - Math.min(...runs.time);
    return { commits: runs.commits, few: runs.time.length <= maxFew, hours: span < hoursBelowDays * 864e5 };
  }

  async function draw(box, runs, one, { axis, others }) {
    const spec = structuredClone(specs[theme()][axis]);
    spec.height = box.clientHeight;
    spec.datasets = datasets(runs, one, others);
    spec.layer = spec.layer.filter((layer) => !layer.data || spec.datasets[layer.data.name].length);
    const known = parameters(runs);
    for (const param of spec.params) param.value = known[param.name] ?? param.value;
    // `ast` evaluates expressions without the JavaScript compiler, which the page's policy forbids.
    const drawn = await window.vegaEmbed(box, spec, {
      ast: true, actions: false, defaultStyle: false, tooltip: false, renderer: "canvas", hover: false,
      logLevel: 1, // errors alone: of data sets that a filter leaves empty it would warn
    });
    return { view: drawn.view, finalize: () => drawn.finalize(), points: spec.datasets.points };
  }

  // The point whose x is next to the pointer's, over the whole width of the chart.
  function nearest(drawn, axis, clientX, box) {
    const scale = drawn.view.scale("x");
    const x = clientX - box.getBoundingClientRect().left - drawn.view.origin()[0];
    let best = null;
    let distance = Infinity;
    for (const point of drawn.points) {
      const apart = Math.abs(scale(point[axis]) - x);
      if (apart < distance) [best, distance] = [point, apart];
    }
    return best;
  }

  const xOf = (drawn, axis, point, box) =>
    drawn.view.scale("x")(point[axis]) + drawn.view.origin()[0] + box.getBoundingClientRect().left;

  return { draw, nearest, xOf };
})();
