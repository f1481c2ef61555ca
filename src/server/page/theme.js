// Before the first paint: the appearance that was chosen here before. Everything else waits for main.js.
"use strict";
try {
  const theme = localStorage.getItem("quern.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage in this browser: as the system has it.
}
