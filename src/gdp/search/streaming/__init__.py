"""Steps whose weights wait on a host and are sent to the devices that compute with them."""
