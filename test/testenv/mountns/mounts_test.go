package mountns

import (
	"slices"
	"strings"
	"testing"
)

const sample = `22 27 0:21 / /proc rw,relatime - proc proc rw
40 27 0:40 / /run/pool rw,relatime - xfs /dev/loop0 rw
41 40 0:40 /volume /run/pool/a\040b\134c rw,relatime - xfs /dev/loop0 rw
42 40 0:40 /volume /run/pool/a\040b\134c rw,relatime - xfs /dev/loop0 rw
43 27 0:41 / /run/pool2 rw,relatime - xfs /dev/loop1 rw
`

func TestBelow(t *testing.T) {
	for _, test := range []struct {
		name, dir string
		want      []string
	}{
		{"a directory, its inside and both of two stacked mounts", "/run/pool",
			[]string{"/run/pool", `/run/pool/a b\c`, `/run/pool/a b\c`}},
		{"one place", `/run/pool/a b\c`, []string{`/run/pool/a b\c`, `/run/pool/a b\c`}},
		{"not a name that begins alike", "/run/poo", nil},
		{"everything", "/", []string{"/proc", "/run/pool", `/run/pool/a b\c`, `/run/pool/a b\c`, "/run/pool2"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := below(test.dir, strings.NewReader(sample))
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("below(%q) = %q, %v; want %q", test.dir, got, err, test.want)
			}
		})
	}
}

func TestBelowRefusesWhatIsNotMountinfo(t *testing.T) {
	if got, err := below("/", strings.NewReader("tmpfs /run\n")); err == nil {
		t.Errorf("below took a line of another file and found %q", got)
	}
}
