"""What tests of pictures share."""

import xml.etree.ElementTree as xml


def text_of(figure):
    """A figure in words; it is well-formed, and no rectangle is drawn beyond its right edge."""
    bundle = figure._repr_mimebundle_()
    svg = bundle["image/svg+xml"]
    root = xml.fromstring(svg)
    assert bundle["text/plain"] == repr(figure)
    assert "<script" not in svg
    attributes = [value for shape in root for value in shape.attrib.values()]
    assert not any("nan" in value for value in attributes)
    width = float(root.get("width"))
    beyond = [
        rect.attrib
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if float(rect.get("x")) + float(rect.get("width")) > width + 0.5
    ]
    assert not beyond, beyond
    return bundle["text/plain"]
