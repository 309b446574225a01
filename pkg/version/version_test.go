package version

import "testing"

func TestVersionIsNeverEmpty(t *testing.T) {
	if Of() == "" {
		t.Error("a program without a version")
	}
	built = "v1.2.3"
	defer func() { built = "" }()
	if got := Of(); got != "v1.2.3" {
		t.Errorf("the version is %s, and not the one that was built in", got)
	}
}
