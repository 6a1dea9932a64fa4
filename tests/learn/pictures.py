"""What tests of pictures share."""

import xml.etree.ElementTree as xml


def text_of(figure):
    """A figure in words; nothing of it is drawn beyond its edge."""
    bundle = figure._repr_mimebundle_()
    root = xml.fromstring(bundle["image/svg+xml"])
    assert bundle["text/plain"] == repr(figure) and "<script" not in figure.drawn
    width = float(root.get("width"))
    beyond = [
        rect.attrib
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if float(rect.get("x")) + float(rect.get("width")) > width + 0.5
    ]
    assert not beyond, beyond
    return bundle["text/plain"]
