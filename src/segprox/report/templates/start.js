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
// Full pictures come last in the file, so a link to one image has to wait for them.
addEventListener("DOMContentLoaded", openFromHash);
