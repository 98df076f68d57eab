"""The traffic: when requests arrive and how long they are. Iterators over times and lengths; pure, so that the load client
offers and the simulator plays the very same requests."""
