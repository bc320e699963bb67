"use strict";
// The values of curves at the pointer, and the completions of a step, chosen by a slider and a
// condition. Text is only ever set as text.
const runs = JSON.parse(document.getElementById("data").textContent);
const steps = [...new Set(runs.flatMap((run) => Object.keys(run.steps).map(Number)))].sort((a, b) => a - b);
const form = document.getElementById("controls");
const place = document.getElementById("completions");

function make(tag, text, parent, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

const number = (value) =>
  value === null || value === undefined ? "-" : String(Number(value.toPrecision(4))).replaceAll("-", "\u2212");
const holds = {
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
};

// The point of a curve whose step is nearest; the points are in the order of their steps.
function nearest(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function showValues(svg) {
  const { left, right, first, last, curves } = JSON.parse(svg.dataset.values);
  const output = svg.parentElement.querySelector("output");
  const line = document.createElementNS(svg.namespaceURI, "line");
  for (const [attribute, value] of Object.entries({ y1: 10, y2: 150, visibility: "hidden" })) line.setAttribute(attribute, value);
  svg.append(line);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width - left) / (right - left);
    const pointed = first + Math.min(1, Math.max(0, share)) * (last - first);
    const chosen = curves.map((points) => (points.length ? nearest(points, pointed) : null));
    const step = chosen.filter(Boolean).reduce((best, [other]) => (Math.abs(other - pointed) < Math.abs(best - pointed) ? other : best), Infinity);
    output.replaceChildren();
    make("span", `step ${number(step)}`, output, { class: "step" });
    chosen.forEach((point, which) => {
      if (point) make("span", number(point[1]), output).style.borderColor = runs[which].color;
    });
    const x = last > first ? left + ((step - first) / (last - first)) * (right - left) : (left + right) / 2;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("visibility", "visible");
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", () => {
    output.replaceChildren();
    line.setAttribute("visibility", "hidden");
  });
}

document.querySelectorAll("svg[data-values]").forEach(showValues);

function valueOf(sample, name) {
  return name in sample.parts ? sample.parts[name] : sample[name];
}

function passes(sample) {
  if (bound.value === "" || !Number.isFinite(bound.valueAsNumber)) return true;
  const value = valueOf(sample, name.value);
  return typeof value === "number" && holds[comparison.value](value, bound.valueAsNumber);
}

function card(run, sample, parent) {
  const article = make("article", null, parent);
  article.style.borderLeftColor = run.color;
  make("h3", `${run.name}: reward ${number(sample.reward)}`, article);
  const facts = Object.entries(sample.parts).map(([part, value]) => `${part} ${number(value)}`);
  if ("advantage" in sample) facts.push(`advantage ${number(sample.advantage)}`);
  if ("tokens" in sample) facts.push(`${number(sample.tokens)} tokens`);
  if ("finished" in sample) facts.push(sample.finished ? "finished" : "cut off");
  make("div", facts.join(", "), article, { class: "facts" });
  for (const title of ["prompt", "completion", "answer"]) {
    if (!(title in sample)) continue;
    const details = make("details", null, article);
    details.open = title !== "prompt" || sample.prompt.length < 1500;
    make("summary", title, details);
    make("pre", sample[title], details);
  }
}

function draw() {
  const step = steps[slider.valueAsNumber];
  const groups = runs.map((run) => (run.steps[step] || []).filter(passes));
  const total = runs.reduce((sum, run) => sum + (run.steps[step] || []).length, 0);
  const shown = groups.reduce((sum, group) => sum + group.length, 0);
  label.textContent = `step ${step} (${slider.valueAsNumber + 1} of ${steps.length})`;
  count.textContent = `${shown} of ${total} completions`;
  place.replaceChildren();
  for (let index = 0; index < Math.max(...groups.map((group) => group.length)); index++) {
    const row = make("div", null, place, { class: "row" });
    row.style.setProperty("--runs", runs.length);
    groups.forEach((group, which) => {
      if (index < group.length) card(runs[which], group[index], row);
      else make("div", null, row);
    });
  }
}

let slider, label, name, comparison, bound, count;
if (steps.length) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  const move = (by) => {
    slider.value = slider.valueAsNumber + by;
    draw();
  };
  make("button", "←", form, { type: "button", "aria-label": "earlier step" }).addEventListener("click", () => move(-1));
  slider = make("input", null, form, { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "step" });
  make("button", "→", form, { type: "button", "aria-label": "later step" }).addEventListener("click", () => move(1));
  label = make("span", "", form);
  const filter = make("label", "only", form);
  name = make("select", null, filter, { "aria-label": "number to filter by" });
  const samples = runs.flatMap((run) => Object.values(run.steps).flat());
  const names = new Set(["reward", ...samples.flatMap((sample) => Object.keys(sample.parts)), "tokens", "advantage"]);
  for (const choice of names) make("option", choice, name, { value: choice });
  comparison = make("select", null, filter, { "aria-label": "comparison" });
  for (const choice of Object.keys(holds)) make("option", choice, comparison, { value: choice });
  bound = make("input", null, filter, { type: "number", step: "any", placeholder: "value", "aria-label": "value" });
  count = make("span", "", form);
  for (const element of [slider, name, comparison, bound]) element.addEventListener("input", draw);
  draw();
}
