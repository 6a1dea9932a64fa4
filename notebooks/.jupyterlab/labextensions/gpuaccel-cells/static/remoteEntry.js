// What JupyterLab loads for `make lab`, without a build step. It does two things:
// * a cell that begins with %%cuda is coloured as C++, not as Python;
// * a picture that is an image of its own (a stored output, the index) gets the colours of
//   JupyterLab's theme, whatever the browser prefers.
(function () {
  "use strict";

  const CPP = "text/x-c++src";
  const IMAGES = [".jp-RenderedSVG img", ".jp-RenderedMarkdown img"];

  function colourCell(model, notebook, seen) {
    if (model.type !== "code" || seen.has(model)) {
      return;
    }
    seen.add(model);
    const update = () => {
      const isCuda = /^%%cuda\b/.test(model.sharedModel.getSource());
      const wanted = isCuda ? CPP : notebook.codeMimetype;
      if (model.mimeType !== wanted) {
        model.mimeType = wanted;
      }
    };
    // The notebook sets every cell's type again when its kernel says which language it speaks.
    model.contentChanged.connect(update);
    model.mimeTypeChanged.connect(update);
    update();
  }

  function colourNotebook(notebook) {
    const seen = new WeakSet();
    const cells = () => {
      if (notebook.model) {
        Array.from(notebook.model.cells).forEach((model) => colourCell(model, notebook, seen));
      }
    };
    const watch = () => {
      if (notebook.model) {
        notebook.model.cells.changed.connect(cells);
      }
      cells();
    };
    notebook.modelChanged.connect(watch);
    watch();
  }

  function followTheme() {
    const rule = (isLight, scheme) => {
      const body = `body[data-jp-theme-light="${isLight}"]`;
      return `${IMAGES.map((image) => `${body} ${image}`).join(",")}{color-scheme:${scheme}}`;
    };
    const style = document.createElement("style");
    style.textContent = rule("true", "light") + rule("false", "dark");
    document.head.appendChild(style);
  }

  const plugin = {
    id: "gpuaccel-cells:plugin",
    description: "Colours %%cuda cells as C++, and pictures as the theme wants them.",
    autoStart: true,
    activate: (app) => {
      followTheme();
      app.docRegistry.addWidgetExtension("Notebook", {
        createNew: (panel) => colourNotebook(panel.content),
      });
    },
  };

  const containers = (window._JUPYTERLAB = window._JUPYTERLAB || {});
  containers["gpuaccel-cells"] = {
    init: () => undefined,
    get: (name) =>
      name === "./extension"
        ? Promise.resolve(() => plugin)
        : Promise.reject(new Error(`gpuaccel-cells has no module ${name}`)),
  };
})();
