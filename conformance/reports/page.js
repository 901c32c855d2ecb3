"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);
  root.classList.add("scripted");

  // Light or dark: the system's, until it is chosen here.
  const theme = one("theme");
  const remembered = (value) => {
    try {  // a page from a file may have no storage
      if (value === undefined) return localStorage.getItem("bitforbit-theme");
      localStorage.setItem("bitforbit-theme", value);
    } catch { /* not remembered */ }
    return null;
  };
  const paint = (name) => {
    root.dataset.theme = name;
    theme.setAttribute("aria-pressed", String(name === "dark"));
  };
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  paint(remembered() || system);
  theme.addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    paint(name);
    remembered(name);
  });

  // Filters.
  const list = one("list");
  const form = document.querySelector(".filters");
  const search = one("search");
  const cases = all("details.case").map((element) => ({
    element,
    text: [".id", ".rule", ".message", ".fault"]
      .flatMap((part) => [...element.querySelectorAll(part)])
      .map((node) => node.textContent)
      .join(" ")
      .toLowerCase(),
    id: element.firstElementChild.id,
    ...element.dataset,
  }));
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcomes = all("[name=outcome]:checked").map((box) => box.value);
    const level = one("level").value;
    const rule = one("rule").value;
    let shown = 0;
    for (const c of cases) {
      const fits =
        outcomes.includes(c.o) &&
        (!level || c.level === level) &&
        (!rule || c.rule === rule) &&
        words.every((word) => c.text.includes(word));
      c.element.hidden = !fits;
      shown += fits;
    }
    one("shown").textContent = `${shown.toLocaleString("en")} of ${cases.length.toLocaleString("en")}`;
    one("none").hidden = shown > 0;
    for (const tile of all(".tile")) {
      tile.setAttribute("aria-pressed", String(search.value === tile.dataset.area));
    }
  };
  const order = () => {
    const by = {
      run: (a, b) => a.number - b.number,
      worst: (a, b) => b.order - a.order || a.number - b.number,
      id: (a, b) => a.id.localeCompare(b.id, "en"),
    }[one("order").value];
    list.append(...cases.sort(by).map((c) => c.element));
  };
  const everything = () => all("[name=outcome]").forEach((box) => { box.checked = !box.disabled; });
  const look = (text) => {
    form.reset();
    everything();
    search.value = text;
    filter();
    one("cases").scrollIntoView();
    search.focus({ preventScroll: true });
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(() => { order(); filter(); }));
  one("order").addEventListener("change", order);
  for (const tile of all(".tile")) {
    tile.addEventListener("click", () => {
      if (search.value === tile.dataset.area) { form.reset(); return; }
      look(tile.dataset.area);
    });
  }
  for (const button of all("[data-search]")) {
    button.addEventListener("click", () => look(button.dataset.search));
  }
  filter();

  // Keys.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      search.focus();
      search.select();
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !(event.target === search || event.target.closest("details.case"))) return;
    const rows = all("details.case:not([hidden]) > summary");
    const here = event.target.closest("details.case");
    const next = here ? rows.indexOf(here.firstElementChild) + step : step > 0 ? 0 : -1;
    if (here && next < 0) { event.preventDefault(); search.focus(); return; }
    if (rows[next]) { event.preventDefault(); rows[next].focus(); }
  });

  // A link to a case opens it, whatever the filters.
  const follow = () => {
    const row = one(decodeURIComponent(location.hash.slice(1)));
    const target = row && row.closest("details.case");
    if (!target) return;
    if (target.hidden) { form.reset(); everything(); filter(); }
    target.open = true;
    row.scrollIntoView();
    row.focus({ preventScroll: true });
  };
  addEventListener("hashchange", follow);
  follow();
})();
