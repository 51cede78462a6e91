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

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.matches(".opener")) toggle(button);
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

  for (const input of document.querySelectorAll("[data-filter]")) {
    input.closest(".filter").hidden = false;
    input.addEventListener("input", () => filter(input));
  }
})();
