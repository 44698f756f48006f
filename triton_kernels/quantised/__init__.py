"""K/V in 8 and 4 bits: the formats, and how values are quantised, packed and unpacked."""
