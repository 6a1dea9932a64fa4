"""What only notebooks need: widgets, magics, recorded, show, exercises/, figures/."""
