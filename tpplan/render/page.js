(() => {
  "use strict";
  const tree = document.getElementById("tree");
  const tools = document.getElementById("tree-tools");
  const field = document.getElementById("tree-filter");
  const found = document.getElementById("tree-found");
  const all = (open) => tree.querySelectorAll("details").forEach((d) => { d.open = open; });

  document.getElementById("tree-open").addEventListener("click", () => all(true));
  document.getElementById("tree-close").addEventListener("click", () => all(false));

  const show = (item, words) => {
    const own = item.textContent.toLowerCase() + " " + item.dataset.path.toLowerCase();
    const inner = [...item.querySelectorAll("li")];
    if (inner.length === 0) {
      item.hidden = !words.every((word) => own.includes(word));
      return item.hidden ? 0 : 1;
    }
    const below = item.querySelectorAll(":scope > details > ul > li");
    let count = 0;
    below.forEach((child) => { count += show(child, words); });
    item.hidden = count === 0;
    return count;
  };
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    tree.querySelectorAll(".tree > li").forEach((item) => { count += show(item, words); });
    if (words.length) all(true);
    found.textContent = words.length ? count + (count === 1 ? " row" : " rows") : "";
  });
  tools.hidden = false;

  // browsers that cannot open details by style alone
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((d) => { d.open = true; });
  });
  addEventListener("afterprint", () => { closed.forEach((d) => { d.open = false; }); });
})();
