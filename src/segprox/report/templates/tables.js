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
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => compareValues(sortValue(a, column), sortValue(b, column), ascending ? 1 : -1));
  table.tBodies[0].append(...rows);
  table.classList.add("sorted"); // lines between groups make no sense any more
}

function startTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => sortTable(table, column));
    });
  }
}
