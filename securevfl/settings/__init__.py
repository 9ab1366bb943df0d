"""Plans and the settings of algorithm families: what a run is told to do, in one form everywhere."""
