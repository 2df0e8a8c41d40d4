"""From an environment to registered ranks: settings, the switch, the world, the controller's start."""
