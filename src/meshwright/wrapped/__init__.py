"""Models of one's own: modules of Flax and Equinox,
and plain pytrees, trained by the trainer's loop and step."""
