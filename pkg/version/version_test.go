package version

import "testing"

// release/ compares the flags of the linker with these names.
func TestReleaseIsKnown(t *testing.T) {
	if Images() != DefaultImages || Repository() != DefaultRepository {
		t.Errorf("without flags of the linker the release is %s of %s", Images(), Repository())
	}
	images, repository = "registry.example.com/storage/", "https://git.example.com/storage"
	defer func() { images, repository = "", "" }()
	if Images() != images || Repository() != repository {
		t.Errorf("the release is %s of %s, and not what was built in", Images(), Repository())
	}
}

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
