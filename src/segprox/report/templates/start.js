/** On paper nothing can be unfolded, so everything is while it is printed. */
function startPrinting() {
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open])")];
    unfolded.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => unfolded.forEach((details) => (details.open = false)));
}

startTheme();
startTables();
startCurves();
startClasses();
startViewer();
startGallery();
startPrinting();
openFromHash();
