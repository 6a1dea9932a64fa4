"""What tests of pictures share."""


def luminance(colour):
    """Relative luminance, as WCAG defines it, of three numbers from 0 to 255."""
    channels = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(words, page):
    """How well words can be read on a page, from 1 to 21. Both are (red, green, blue)."""
    darker, lighter = sorted((luminance(words), luminance(page)))
    return (lighter + 0.05) / (darker + 0.05)


def rgb(colour):
    """The three numbers of "#rrggbb" or "#rgb"."""
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    return tuple(int(digits[k : k + 2], 16) for k in (0, 2, 4))
