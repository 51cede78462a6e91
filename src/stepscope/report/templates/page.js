"use strict";

(() => {
  const details = JSON.parse(document.getElementById("details").textContent);
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  // Numbers sort before text, and missing values last in both directions.
  function sortKey(cell) {
    if (cell.dataset.value !== undefined) return { rank: 0, value: Number(cell.dataset.value) };
    if (cell.classList.contains("none")) return { rank: 2, value: 0 };
    return { rank: 1, value: cell.textContent };
  }

  function compare(a, b, sign) {
    if (a.rank !== b.rank) return a.rank - b.rank;
    if (a.rank === 0) return sign * (a.value - b.value);
    return a.rank === 1 ? sign * collator.compare(a.value, b.value) : 0;
  }

  function sort(header) {
    const table = header.closest("table");
    const body = table.tBodies[0];
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    const rows = [...body.rows].filter((row) => row.dataset.row !== undefined);
    const keyed = rows.map((row) => ({
      row,
      opened: row.nextElementSibling?.matches(".opened") ? row.nextElementSibling : null,
      key: sortKey(row.cells[header.cellIndex]),
    }));
    keyed.sort((a, b) => compare(a.key, b.key, ascending ? 1 : -1));
    for (const { row, opened } of keyed) {
      body.append(row);
      if (opened) body.append(opened);
    }
    for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  }

  function toggle(opener) {
    const row = opener.closest("tr");
    const open = opener.getAttribute("aria-expanded") !== "true";
    opener.setAttribute("aria-expanded", String(open));
    if (!open) {
      row.nextElementSibling.remove();
      return;
    }
    const text = document.createElement("pre");
    text.textContent = details[row.closest("table").id][Number(row.dataset.row)];
    const opened = document.createElement("tr");
    opened.className = "opened";
    const cell = opened.insertCell();
    cell.colSpan = row.cells.length;
    cell.append(text);
    row.after(opened);
  }

  function filter(input) {
    const table = document.getElementById(input.dataset.filter);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    let total = 0;
    for (const row of table.tBodies[0].rows) {
      if (row.dataset.row === undefined) {
        row.hidden = row.previousElementSibling.hidden;
        continue;
      }
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      total += 1;
      shown += row.hidden ? 0 : 1;
    }
    const status = input.closest(".filter").querySelector("[role=status]");
    status.textContent = words.length ? `${shown} of ${total} rows` : "";
  }

  const tip = document.getElementById("tip");
  let hinted = null;

  function placeTip() {
    if (!hinted) return;
    const box = hinted.getBoundingClientRect();
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, Math.min(box.left, room))}px`;
    tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
  }

  function showTip(button) {
    hinted = button;
    tip.textContent = document.getElementById(button.getAttribute("aria-describedby")).textContent;
    tip.hidden = false;
    placeTip();
  }

  function hideTip() {
    hinted = null;
    tip.hidden = true;
  }

  async function copy(button) {
    const text = button.closest(".code").querySelector("pre").textContent;
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without permission, or outside of a secure context: select the text for the older command.
      const range = document.createRange();
      range.selectNodeContents(button.closest(".code").querySelector("pre"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.matches(".copy")) copy(button);
    else if (button?.matches(".opener")) toggle(button);
    else if (button?.matches("th button")) sort(button.closest("th"));
  });

  for (const button of document.querySelectorAll(".hinted")) {
    button.addEventListener("pointerenter", () => showTip(button));
    button.addEventListener("focus", () => showTip(button));
    button.addEventListener("pointerleave", hideTip);
    button.addEventListener("blur", hideTip);
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  document.addEventListener("scroll", placeTip, { capture: true, passive: true });

  const flames = JSON.parse(document.getElementById("flames").textContent);
  const [NAME, VALUE, CHILDREN] = [0, 1, 2];
  // A label needs this many pixels; two letters and an ellipsis say nothing.
  const LEAST_LABEL = 36;
  const MEANINGS = ["idle", "communication"];

  function amount(value, unit) {
    if (unit === "ms") return value >= 1 ? `${value.toPrecision(4)} ms` : `${(value * 1e3).toPrecision(3)} µs`;
    const power = Math.min(4, Math.floor(Math.log2(Math.max(value, 1)) / 10));
    return `${(value / 2 ** (10 * power)).toPrecision(4)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }

  function hue(name) {
    let hash = 0;
    for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
    return hash;
  }

  function drawFlame(box, view, path) {
    const total = view.root[VALUE];
    const focus = path.length ? path[path.length - 1] : view.root;
    box.replaceChildren();
    let depth = 0;

    function draw(frame, left, width, level, ancestors) {
      depth = Math.max(depth, level + 1);
      const button = document.createElement("button");
      button.type = "button";
      button.className = "frame";
      button.style.left = `${100 * left}%`;
      button.style.width = `${100 * width}%`;
      button.style.top = `${1.5 * level}rem`;
      button.style.setProperty("--hue", hue(frame[NAME]));
      const share = (100 * frame[VALUE]) / total;
      if (MEANINGS.includes(frame[NAME])) button.classList.add(frame[NAME]);
      if (width * (box.clientWidth || 800) >= LEAST_LABEL) button.textContent = frame[NAME];
      else button.setAttribute("aria-label", frame[NAME]);
      button.title = `${frame[NAME]}: ${amount(frame[VALUE], view.unit)}, ${share.toFixed(1)} %`;
      button.addEventListener("click", () => drawFlame(box, view, [...ancestors, frame].slice(1)));
      box.append(button);
      let at = left;
      for (const child of frame[CHILDREN]) {
        const part = (width * child[VALUE]) / frame[VALUE];
        draw(child, at, part, level + 1, [...ancestors, frame]);
        at += part;
      }
    }

    const above = path.length ? [view.root, ...path.slice(0, -1)] : [];
    above.forEach((frame, level) => {
      draw([frame[NAME], frame[VALUE], []], 0, 1, level, above.slice(0, level));
    });
    draw(focus, 0, 1, above.length, above);
    box.style.height = `${1.5 * depth}rem`;
    const status = box.closest("figure").querySelector("[role=status]");
    const share = (100 * focus[VALUE]) / total;
    status.textContent = `${focus[NAME]}: ${amount(focus[VALUE], view.unit)}, ${share.toFixed(1)} %`;
  }

  for (const box of document.querySelectorAll("[data-flame]")) {
    const views = flames[box.dataset.flame];
    const bar = box.closest("figure").querySelector(".flame-bar");
    let shown = views[0];
    bar.hidden = false;
    drawFlame(box, shown, []);
    bar.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if (button.dataset.view !== undefined) {
        shown = views[Number(button.dataset.view)];
        for (const other of bar.querySelectorAll("[data-view]")) {
          other.setAttribute("aria-pressed", String(other === button));
        }
      }
      drawFlame(box, shown, []);
    });
  }

  // A link into a fold opens it, and so does printing.
  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) {
      fold.open = true;
    }
    if (target?.closest("details")) target.scrollIntoView();
  }
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details.evidence")) fold.open = true;
  });

  const search = document.getElementById("search");
  search.closest(".search").hidden = false;
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    const cards = document.querySelectorAll("section.card");
    for (const card of cards) {
      const text = card.textContent.toLowerCase();
      card.hidden = !words.every((word) => text.includes(word));
      shown += card.hidden ? 0 : 1;
      const fold = card.querySelector("details.evidence");
      if (fold && words.length) {
        const lead = [...card.children].filter((child) => child !== fold);
        const visible = lead.map((child) => child.textContent.toLowerCase()).join(" ");
        fold.open = !card.hidden && !words.every((word) => visible.includes(word));
      }
    }
    const status = search.closest(".search").querySelector("[role=status]");
    status.textContent = words.length ? `${shown} of ${cards.length} sections` : "";
  });

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const current = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "0px 0px -70% 0px" });
  for (const card of document.querySelectorAll("section.card")) current.observe(card);

  for (const input of document.querySelectorAll("[data-filter]")) {
    input.closest(".filter").hidden = false;
    input.addEventListener("input", () => filter(input));
  }
})();
