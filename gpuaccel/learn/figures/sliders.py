"""A picture that sliders change, in a notebook.

    self._handle = display_below_sliders(self, sliders, "Run this cell to choose with sliders.")

The picture is an output of its own, so that it stays in the saved notebook.
"""


def display_below_sliders(view, sliders, hint: str):
    """Display sliders, if there are any, and below them the picture.

    Args:
        view: has _repr_mimebundle_().
        sliders: an ipywidgets box, or None.
        hint: stands in the sliders' place in a saved notebook.

    Returns:
        The picture's display handle; update() draws it anew.
    """
    from IPython.display import display

    if sliders is not None:
        widget = {"version_major": 2, "version_minor": 0, "model_id": sliders.model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": widget, "text/plain": hint}
        display(bundle, raw=True)
    return display(view._repr_mimebundle_(), raw=True, display_id=True)
