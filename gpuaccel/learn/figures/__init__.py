"""Pictures of the notebooks, as SVG: picture and panels draw, the other modules say what."""
