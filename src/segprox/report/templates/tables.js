/** What a cell is sorted by: its number if it has one, nothing (always last) if that is unknown, else its text. */
function sortValue(row, column) {
  const cell = row.cells[column];
  if (!("value" in cell.dataset)) return cell.textContent;
  const value = Number(cell.dataset.value.replace("inf", "Infinity"));
  return cell.dataset.value === "" || Number.isNaN(value) ? null : value;
}

function compareValues(first, second, sign) {
  if (first === null || second === null) return (first === null) - (second === null);
  if (typeof first === "number") return sign * ((first > second) - (first < second));  // infinite ones may be equal
  return sign * first.localeCompare(second, undefined, { numeric: true });
}

function sortTable(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const ascending = heads[column].getAttribute("aria-sort") !== "ascending";
  heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : ascending ? "ascending" : "descending"));
  for (const body of table.tBodies) { // each group on its own, below its heading
    const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
    rows.sort((a, b) => compareValues(sortValue(a, column), sortValue(b, column), ascending ? 1 : -1));
    body.append(...rows);
  }
}

function startTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => sortTable(table, column));
    });
  }
}
