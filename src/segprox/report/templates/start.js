startTheme();
startTables();
startCurves();
startClasses();
startViewer();
startGallery();
// Full pictures come last in the file, so a link to one image has to wait for them.
addEventListener("DOMContentLoaded", openFromHash);
