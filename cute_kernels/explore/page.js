"use strict";
// The parts of the page are there without this script, which selects, sorts, filters, plots and zooms.
const $ = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const lines = all("#table tbody tr"), heads = all("#table thead th"), selects = all("select[data-field]");
const cell = (line, column) => line.cells[column].dataset.v ?? "";
const number = text => text !== "" && !isNaN(text);
const make = (name, attributes = {}, ...inside) => {
  const svg = ["svg", "circle", "line", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
};

// A row is selected everywhere at once: in the table, by the settings, in the maps, in the plot.
function choose(row) {
  const line = lines.find(each => each.dataset.row === String(row));
  if (!line) return;
  lines.forEach(each => each.classList.toggle("chosen", each === line));
  $("input", line).checked = true;
  all("article").forEach(each => { each.hidden = each.id !== "row-" + row; });
  all(".banks").forEach(each => { each.hidden = !each.dataset.rows.split(" ").includes(String(row)); });
  for (const select of selects) {
    const value = line.getAttribute("data-set-" + select.dataset.field);
    select.value = value ?? "";
  }
  const article = $("#row-" + row), place = $(".map-of-row", article);
  for (const map of all("#maps figure")) {
    const mine = map.dataset.rows.split(" ").includes(String(row));
    map.classList.toggle("chosen", mine);
    if (mine && !place.hasChildNodes()) {
      const names = all("span", map).map(part => make("li", {}, part.title));
      place.append(make("h3", {}, "Memory of a CTA"), ...all(".bar", map).map(bar => bar.cloneNode(true)), make("ul", {}, ...names));
    }
  }
  all("#plot circle").forEach(each => each.classList.toggle("chosen", each.dataset.row === String(row)));
}
for (const line of lines) {
  line.addEventListener("click", () => choose(line.dataset.row));
  $("input", line).addEventListener("change", () => choose(line.dataset.row));
}
$("#default")?.addEventListener("click", () => choose(0));
for (const select of selects) {
  select.addEventListener("change", () => {
    // Of the rows that have the value, the one that agrees with most of the other choices.
    const agrees = line => selects.reduce((sum, each) =>
      sum + (line.getAttribute("data-set-" + each.dataset.field) === each.value) * (each === select ? 100 : 1), 0);
    choose(lines.reduce((best, line) => agrees(line) > agrees(best) ? line : best).dataset.row);
  });
}

// The table: order, filter, columns.
heads.forEach((head, column) => $("button", head).addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") === "ascending";
  heads.forEach(each => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const compare = (a, b) => number(a) && number(b) ? a - b : a.localeCompare(b);
  const sorted = [...lines].sort((one, other) => {
    const [a, b] = [cell(one, column), cell(other, column)];
    return a === "" || b === "" ? (a === "") - (b === "") : compare(a, b) * (down ? -1 : 1);
  });
  $("#table tbody").append(...sorted);
}));
const names = heads.map(head => head.textContent.trim());
function passes(line, word) {
  const found = word.match(/^(\S+?)(<=|>=|<|>|=)(\S+)$/);
  const column = found ? names.findIndex(name => name.replaceAll(" ", "_").startsWith(found[1])) : -1;
  if (column < 0) return line.textContent.toLowerCase().includes(word.toLowerCase());
  const [have, want] = [cell(line, column), found[3]];
  if (found[2] === "=") return have === want;
  if (!number(have)) return false;
  return { "<": have - want < 0, ">": have - want > 0, "<=": have - want <= 0, ">=": have - want >= 0 }[found[2]];
}
function filter() {
  const words = $("#filter").value.split(" ").filter(Boolean);
  for (const line of lines) {
    const refused = $("#legal").checked && line.classList.contains("refused");
    line.hidden = refused || !words.every(word => passes(line, word));
  }
  $("#found").value = `${lines.filter(line => !line.hidden).length} of ${lines.length} rows`;
}
$("#filter")?.addEventListener("input", filter);
$("#legal")?.addEventListener("change", filter);
for (const box of all("#columns input")) {
  box.addEventListener("change", () => {
    for (const line of all("#table tr")) line.cells[box.dataset.column].hidden = !box.checked;
  });
}
for (const place of all(".copy")) {
  const button = make("button", { type: "button" }, "copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText($("pre", place).textContent);
    button.textContent = "copied";
  });
  place.append(button);
}

// A plot of two columns of numbers.
const numeric = names.map((_, column) => column).filter(column => column && lines.some(line => number(cell(line, column))));
const least = names.indexOf("modelled_us_least"), most = names.indexOf("modelled_us_most");
const axes = ["shared_bytes", "measured_us", "modelled_us", "warp_instructions", "registers"].map(name => names.indexOf(name));
const [x, y] = !$("#axes") ? [] : ["x", "y"].map((name, position) => {
  const select = make("select", {}, ...numeric.map(column => make("option", { value: column }, names[column])));
  select.value = axes.filter(column => numeric.includes(column))[position] ?? numeric[position] ?? "";
  select.addEventListener("change", plot);
  $("#axes").append(make("label", {}, `${name}: `, select), " ");
  return select;
});
function plot() {
  const shown = lines.filter(line => number(cell(line, x.value)) && number(cell(line, y.value)));
  const values = (select, more = []) => shown.flatMap(line => [select.value, ...more].map(column => +cell(line, column)));
  const ranged = names[y.value] === "modelled_us" ? [least, most] : [];
  const scale = (found, from, to) => {
    const [low, high] = [Math.min(...found), Math.max(...found)];
    return value => high > low ? from + (value - low) / (high - low) * (to - from) : (from + to) / 2;
  };
  const across = scale(values(x), 12, 88), up = scale(values(y, ranged), 88, 10);
  const svg = make("svg", { role: "img", "aria-label": `${names[y.value]} against ${names[x.value]}` });
  for (const line of shown) {
    const [here, there] = [across(+cell(line, x.value)), up(+cell(line, y.value))];
    const at = `${here}%`;
    if (ranged.length) svg.append(make("line", { x1: at, x2: at, y1: `${up(+cell(line, least))}%`, y2: `${up(+cell(line, most))}%` }));
    const words = `row ${line.dataset.row}: ${names[x.value]} ${cell(line, x.value)}, ${names[y.value]} ${cell(line, y.value)}`;
    const point = make("circle", { cx: at, cy: `${there}%`, r: 6, "data-row": line.dataset.row }, make("title", {}, words));
    point.addEventListener("click", () => choose(line.dataset.row));
    svg.append(point, make("text", { x: `${here + 1.5}%`, y: `${there}%` }, line.dataset.row));
  }
  $("#plot").replaceChildren(svg);
  const chosen = $("input[name=row]:checked");
  if (chosen) choose(chosen.value);
}

// The timeline: the part of its axis that is seen.
const picture = $("#timeline svg");
if (picture) {
  const { width: whole, height } = picture.viewBox.baseVal;
  let [first, width] = [0, whole];
  const look = (start, size) => {
    width = Math.min(whole, Math.max(10, size));
    first = Math.min(whole - width, Math.max(0, start));
    picture.setAttribute("viewBox", `${first} 0 ${width} ${height}`);
    $("#span").textContent = `steps ${Math.round(first)} to ${Math.round(first + width)} of ${Math.round(whole)}`;
  };
  const zoom = (factor, at = .5) => look(first + width * at * (1 - factor), width * factor);
  const keys = { ArrowLeft: () => look(first - width / 5, width), ArrowRight: () => look(first + width / 5, width),
    "+": () => zoom(.5), "-": () => zoom(2), "0": () => look(0, whole) };
  picture.addEventListener("keydown", event => {
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  picture.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    zoom(event.deltaY > 0 ? 1.25 : .8, event.offsetX / picture.clientWidth);
    event.preventDefault();
  }, { passive: false });
  picture.addEventListener("pointermove", event => {
    if (event.buttons) look(first - event.movementX / picture.clientWidth * width, width);
  });
  for (const key of ["ArrowLeft", "ArrowRight", "+", "-", "0"]) {
    const button = make("button", { type: "button", "aria-label": `timeline ${key}` }, { ArrowLeft: "←", ArrowRight: "→", "-": "−" }[key] ?? key);
    button.addEventListener("click", keys[key]);
    $("#span").before(button);
  }
  look(0, whole);
}
if (numeric.length) plot();
const firstLegal = lines.find(line => !line.classList.contains("refused")) ?? lines[0];
if (lines.length) {
  filter();
  choose(location.hash.slice(5) || firstLegal.dataset.row);
}
window.addEventListener("hashchange", () => choose(location.hash.slice(5)));
