"""Steps of one model run in several ways and compared: verification, sweeps, alternatives."""
