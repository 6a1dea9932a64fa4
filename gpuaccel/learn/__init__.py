"""What only notebooks need: widgets, magics, recorded, show, ladders, exercises/, figures/."""
