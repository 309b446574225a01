package blockdev

// FindTargets is the search among what a configuration has the kernel serve.
func FindTargets(of []Facts, config, host string) (Users, error) {
	s := newSearch(View{}, of)
	err := s.targets(config, host)
	return s.users, err
}

// FileMappings are how many files a process has mapped that were opened for writing, as kernels before 6.11 say.
func FileMappings(pid int) (int, error) {
	found, err := fileMappings(pid)
	return len(found), err
}
