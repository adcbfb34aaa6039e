"use strict";
// Shows, hides and orders what is on the page. It makes no markup.
const list = document.getElementById("rollouts");
const all = Array.from(list.children);
const find = document.getElementById("find");
const show = document.getElementById("show");
const order = document.getElementById("order");
const count = document.getElementById("count");
const number = (element, name) => Number(element.dataset[name]);
const orders = {
  listed: (a, b) => number(a, "listed") - number(b, "listed"),
  worst: (a, b) => number(a, "reward") - number(b, "reward") || number(b, "calls") - number(a, "calls"),
  longest: (a, b) => number(b, "tokens") - number(a, "tokens"),
};
function update() {
  const words = find.value.toLowerCase();
  let shown = 0;
  for (const element of all) {
    const fits = show.value === "all" || element.dataset.verdict === show.value;
    element.hidden = !(fits && element.textContent.toLowerCase().includes(words));
    shown += element.hidden ? 0 : 1;
  }
  list.append(...[...all].sort(orders[order.value]));
  count.textContent = `${shown} of ${all.length} shown`;
}
for (const control of [find, show, order]) control.addEventListener("input", update);
update();
