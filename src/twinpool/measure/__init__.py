"""One definition of TTFT, its parts and the gaps for everyone who measures: pure, fed with times that others read."""
