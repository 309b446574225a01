package blockdev

// FindTargets is the search among what a configuration has the kernel serve.
func FindTargets(of []Facts, config, host string) (Users, error) {
	s := newSearch(View{}, of)
	err := s.targets(config, host)
	return s.users, err
}
