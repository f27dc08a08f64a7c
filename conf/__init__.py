"""The Hydra configuration, packaged as `runner.conf`."""
