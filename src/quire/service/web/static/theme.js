// Before anything is drawn: the colours somebody chose here, or none, and then the system decides.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("quire-theme");
  } catch {
    // storage may be forbidden; the system's colours are fine
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
