package version

import "testing"

func TestVersionIsNeverEmpty(t *testing.T) {
	if Of() == "" {
		t.Error("a program without a version")
	}
	built = "v1.2.3"
	defer func() { built = "" }()
	if got := Of(); got != "v1.2.3" || Tag() != got {
		t.Errorf("the version is %s and the tag %s, and not those that were built in", got, Tag())
	}
}
