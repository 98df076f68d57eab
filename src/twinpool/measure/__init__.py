"""One definition of TTFT, of the gaps, of use and of the verdict for everyone who measures: pure, fed with times that others
read."""
