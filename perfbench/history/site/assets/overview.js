"use strict";
// The overview: what is shown by the filter and the time, both kept in the address.
(() => {
  const { matcher, state, keep } = window.perfbench;
  const words = document.getElementById("words");
  if (!words) return; // no run
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  const changes = document.getElementById("changes");
  const newest = Date.parse(changes.dataset.newest);
  const chips = [...document.querySelectorAll(".chips button")];
  const since = [...document.querySelectorAll("#since input")];
  const cells = [...document.querySelectorAll(".cells tbody tr")];
  const changed = [...changes.tBodies[0].rows];
  const suites = [...document.querySelectorAll("section.suite")];
  for (const row of [...cells, ...changed]) row.text = `${row.textContent} ${row.dataset.text || ""}`;

  function apply() {
    const matches = matcher(words.value);
    const days = Number(since.find((one) => one.checked).value);
    let count = 0;
    for (const row of cells) {
      const fits = matches(row.dataset.terms, row.text);
      row.hidden = !fits;
      count += fits;
    }
    for (const suite of suites) suite.hidden = !suite.querySelector("tbody tr:not([hidden])");
    let visible = 0;
    for (const row of changed) {
      const late = !days || Number(row.dataset.time) > newest - days * 864e5;
      row.hidden = !(late && matches(row.dataset.terms, row.text));
      visible += !row.hidden;
    }
    changes.parentElement.hidden = visible === 0;
    nothing.hidden = visible > 0;
    nothing.textContent = changed.length
      ? `Nothing here; ${changed.length} changes at other times or in other cells.`
      : "No change point is reported, and no verdict turned. perfbench detect looks for change points.";
    shown.textContent = `${count} of ${cells.length} cells`;
    const typed = words.value.split(/\s+/);
    for (const chip of chips) chip.setAttribute("aria-pressed", typed.includes(chip.dataset.add));
  }

  function read() {
    const now = state();
    words.value = now.get("q") || "";
    const days = now.get("since") || "7";
    since.forEach((one) => { one.checked = one.value === days; });
    if (!since.some((one) => one.checked)) since[1].checked = true;
    apply();
  }

  function changedByHand() {
    const days = since.find((one) => one.checked).value;
    keep({ q: words.value.trim(), since: days === "7" ? "" : days });
    apply();
  }

  words.addEventListener("input", changedByHand);
  document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
  since.forEach((one) => one.addEventListener("change", changedByHand));
  chips.forEach((chip) => chip.addEventListener("click", () => {
    const typed = words.value.split(/\s+/).filter(Boolean);
    const others = typed.filter((word) => !chips.some((one) => one.dataset.add === word));
    words.value = typed.includes(chip.dataset.add) ? others.join(" ") : [...others, chip.dataset.add].join(" ");
    changedByHand();
  }));
  addEventListener("hashchange", read);
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    words.focus();
  });
  read();
})();
