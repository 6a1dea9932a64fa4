"""What `ga.show` and the live view draw: SVG in colours that suit light and dark pages."""
