"""What starts and orders work on a GPU, and all private interfaces of other packages."""
