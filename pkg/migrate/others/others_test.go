package others_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/migrate/others"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A node has the directory old/volume, which goes to pool/volume.
type node struct {
	*testing.T
	at string
	others.Others
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{T: t, at: t.TempDir(), Others: others.Others{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}}}
	n.mkdir("old/volume/sub/deep")
	n.mkdir("old/volume-2")
	n.mkdir("pool")
	must.Succeed(t, os.WriteFile(n.path("old/volume/file"), nil, 0o600))
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.at, name) }

func (n *node) mkdir(name string) {
	n.Helper()
	must.Succeed(n.T, os.MkdirAll(n.path(name), 0o755))
}

func (n *node) link(to, name string) {
	n.Helper()
	must.Succeed(n.T, os.Symlink(to, n.path(name)))
}

func (n *node) mount(source, at, kind string, flags uintptr) {
	n.Helper()
	must.Succeed(n.T, unix.Mount(source, n.path(at), kind, flags, ""))
	n.Cleanup(func() { must.Succeed(n.T, unix.Unmount(n.path(at), 0)) })
}

func (n *node) check() error {
	n.Helper()
	root, err := dir.Open("/")
	must.Succeed(n.T, err)
	defer func() { must.Succeed(n.T, root.Close()) }()
	w, err := others.New(root, store.VolumePath{Directory: n.path("old"), Name: "volume"}, store.VolumePath{Directory: n.path("pool"), Name: "volume"})
	must.Succeed(n.T, err)
	return n.Check(w)
}

// want expects that a pod is named, or that nothing has the directory.
func (n *node) want(has bool) {
	n.Helper()
	err := n.check()
	if (err != nil) != has || has && !strings.Contains(err.Error(), "pod space/user has the ") {
		n.Errorf("%v, and a pod has it: %t", err, has)
	}
}

// pod has a volume, and mounts it.
func pod(source corev1.VolumeSource, mount corev1.VolumeMount) corev1.Pod {
	mount.Name = "data"
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "user"}, Spec: corev1.PodSpec{
		Volumes:    []corev1.Volume{{Name: "data", VolumeSource: source}},
		Containers: []corev1.Container{{VolumeMounts: []corev1.VolumeMount{mount}}},
	}}
}

func hostPath(path string) corev1.VolumeSource {
	return corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}
}

func TestPath(t *testing.T) {
	testenv.NeedRoot(t)
	tests := map[string]struct {
		make func(n *node)
		path string
		has  bool
	}{
		"the directory":                      {nil, "old/volume", true},
		"where it goes":                      {nil, "pool/volume", true},
		"what is missing where it goes":      {nil, "pool/volume/none/more", true},
		"a directory in it":                  {nil, "old/volume/sub", true},
		"what is missing in it":              {nil, "old/volume/none", true},
		"the directory above":                {nil, "old", false},
		"a directory beside it":              {nil, "old/volume-2", false},
		"what is missing beside it":          {nil, "old/none", false},
		"a link to it":                       {func(n *node) { n.link(n.path("old/volume"), "link") }, "link", true},
		"below a link to the one above":      {func(n *node) { n.link("old", "link") }, "link/volume", true},
		"where it goes, below a link":        {func(n *node) { n.link("pool", "link") }, "link/volume", true},
		"a link beside it":                   {func(n *node) { n.link("old/volume-2", "link") }, "link", false},
		"a mount of it":                      {bind("old/volume"), "mnt", true},
		"a mount of the one above":           {bind("old"), "mnt", false},
		"below a mount of the one above":     {bind("old"), "mnt/volume", true},
		"where it goes, below a mount":       {bind("pool"), "mnt/volume", true},
		"a mount of a directory in it":       {bind("old/volume/sub"), "mnt", true},
		"in a mount of a directory in it":    {bind("old/volume/sub"), "mnt/deep", true},
		"what is missing in such a mount":    {bind("old/volume/sub"), "mnt/none", true},
		"a mount of a directory beside it":   {bind("old/volume-2"), "mnt", false},
		"a mount of a file in it":            {bind("old/volume/file"), "mnt", true},
		"what is mounted in it, by a link":   {mountedInside, "link", true},
		"a mount of something mounted in it": {func(n *node) { mountedInside(n); bind("old/volume/sub")(n) }, "mnt", false},
		"another filesystem":                 {func(n *node) { n.mkdir("mnt"); n.mount("none", "mnt", "tmpfs", 0) }, "mnt/old/volume", false},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			n := newNode(t)
			if tt.make != nil {
				tt.make(n)
			}
			n.Pods = []corev1.Pod{pod(hostPath(n.path(tt.path)), corev1.VolumeMount{})}
			n.want(tt.has)
		})
	}
}

// bind mounts something elsewhere.
func bind(of string) func(n *node) {
	return func(n *node) {
		info, err := os.Stat(n.path(of))
		must.Succeed(n.T, err)
		if info.IsDir() {
			n.mkdir("mnt")
		} else {
			must.Succeed(n.T, os.WriteFile(n.path("mnt"), nil, 0o600))
		}
		n.mount(n.path(of), "mnt", "", unix.MS_BIND)
	}
}

func mountedInside(n *node) {
	n.mount("none", "old/volume/sub", "tmpfs", 0)
	n.link("old/volume/sub", "link")
}

// A pod may have the directory as a part of a volume that others may have.
func TestSubPath(t *testing.T) {
	claim := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "all"}}
	tests := map[string]struct {
		source *corev1.VolumeSource // nil for the directory above as a hostPath
		mount  corev1.VolumeMount
		has    bool
	}{
		"the directory":                   {nil, corev1.VolumeMount{SubPath: "volume"}, true},
		"a directory in it":               {nil, corev1.VolumeMount{SubPath: "volume/sub"}, true},
		"a directory beside it":           {nil, corev1.VolumeMount{SubPath: "volume-2"}, false},
		"one that follows from variables": {nil, corev1.VolumeMount{SubPathExpr: "$(WHICH)"}, true},
		"such a one of something else":    {&corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/proc"}}, corev1.VolumeMount{SubPathExpr: "$(WHICH)"}, false},
		"of the claim of the one above":   {&claim, corev1.VolumeMount{SubPath: "volume"}, true},
		"beside it, of that claim":        {&claim, corev1.VolumeMount{SubPath: "volume-2"}, false},
		"of the pod's own claim":          {&corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}, corev1.VolumeMount{SubPath: "volume"}, true},
		"of a claim of something else":    {&corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "none"}}, corev1.VolumeMount{SubPath: "volume"}, false},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			n := newNode(t)
			n.mkdir("retained")
			for _, claim := range []string{"all", "user-data"} {
				for _, path := range []string{"retained", "old", "retained"} { // those of earlier claims of the name
					n.Volumes = append(n.Volumes, corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
						ClaimRef:               &corev1.ObjectReference{Namespace: "space", Name: claim},
						PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: n.path(path)}},
					}})
				}
			}
			source := hostPath(n.path("old"))
			if tt.source != nil {
				source = *tt.source
			}
			plain := pod(source, tt.mount)
			init := *plain.DeepCopy()
			init.Spec.InitContainers, init.Spec.Containers = init.Spec.Containers, nil
			for _, p := range []corev1.Pod{plain, init} {
				n.Pods = []corev1.Pod{p}
				n.want(tt.has)
			}
		})
	}
}

// One that no pod of the node can use has another directory.
func TestVolume(t *testing.T) {
	n := newNode(t)
	pv := corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: corev1.PersistentVolumeSpec{
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: hostPath(n.path("old/volume/")).HostPath}}}
	n.Volumes = []corev1.PersistentVolume{pv}
	if err := n.check(); err == nil || !strings.Contains(err.Error(), "PersistentVolume other has the directory too") {
		t.Errorf("for any node: %v", err)
	}
	n.Volumes[0].Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{"node-b"}}}}}}}
	must.Succeed(t, n.check())
	n.Anywhere = true
	if err := n.check(); err == nil {
		t.Error("for another node, where all have the directory: it is not refused")
	}
}

func TestPathThatLeadsNowhere_isRefused(t *testing.T) {
	n := newNode(t)
	n.link(n.path("loop"), "loop")
	n.Pods = []corev1.Pod{pod(hostPath(n.path("loop")), corev1.VolumeMount{})}
	if err := n.check(); err == nil || !strings.Contains(err.Error(), "pod space/user: look where "+n.path("loop")+" leads") {
		t.Errorf("%v", err)
	}
}

func TestNew_notInTheRootDirectoryOfTheNode(t *testing.T) {
	n := newNode(t)
	root, err := dir.Open(t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, root.Close()) }()
	if _, err := others.New(root, store.VolumePath{Directory: n.path("old"), Name: "volume"}); err == nil || !strings.Contains(err.Error(), "is not the root directory of the node") {
		t.Errorf("%v", err)
	}
}
