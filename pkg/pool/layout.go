package pool

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// The names of the layout. None is a volume id, since none of what lies in the
// pool itself starts with a letter or digit.
const (
	ownName     = ".hostpath-provisioner"
	formatName  = "format"
	volumesName = "volumes"
	stagingName = "staging"
	trashName   = "trash"
	lockName    = "lock"

	formatVersion = 1
	maxFormat     = 4 << 10 // bytes
)

// A format says what layout a pool has, and which pool it is.
type format struct {
	Version int    `json:"version"`
	UUID    string `json:"uuid"`
	// Foreign is what others had taken when the pool was made, in bytes.
	Foreign int64     `json:"foreignBytes"`
	Created time.Time `json:"created"`
}

// A session is a pool while one call works on it: handles on its directories.
// Nothing is held between calls, so that an administrator can unmount the pool.
type session struct {
	pool *Pool
	root *dir.Dir // the pool's directory
	// quota keeps the sizes of the volumes that have limits; nil if nobody does.
	quota Quota
	// unenforced is why new volumes get none; nil if they do.
	unenforced error
	claims     *claims  // the ids that are given on the filesystem
	own        *dir.Dir // ownName in it
	// volumes has the records.
	volumes *dir.Dir
	// staging and trash are those of this node, opened by work.
	staging, trash *dir.Dir
}

func (s *session) close() {
	for _, d := range []*dir.Dir{s.trash, s.staging, s.volumes, s.own, s.root} {
		if d != nil {
			_ = d.Close() // opened for reading: nothing can be lost
		}
	}
}

// enter opens the pool for one call and makes sure that it is the one that was
// opened at first, and not the bare directory below a mount that went away.
func (p *Pool) enter() (*session, error) {
	// The state first: once it says that the pool serves, there is an identity.
	st, id := p.state.Load(), p.identity.Load()
	// What a disk cannot be asked for any more may be in memory, and must not deceive.
	if st.err != nil && (id == nil || st.hung || errors.Is(st.err, errUnreadable) || errors.Is(st.err, errNested)) {
		return nil, st.err
	}
	if p.hung.Load() == st {
		return nil, p.hangs()
	}
	if err := p.unfit(id.unenforced); err != nil && !st.readOnly() {
		return nil, p.unavailable(err)
	}
	s, err := p.openCached(id)
	if err != nil {
		s, err = p.openInTime(id, st)
	}
	if err != nil {
		return nil, p.unavailable(err)
	}
	return s, nil
}

var errNotCached = errors.New("memory does not tell whether it is the pool that was opened")

// openCached is openSession for what memory tells, as it does nearly always: it waits for
// nothing, and so needs nobody to wait in its place, which would cost more than all that
// it does. What it answers an error to, openSession has to look at.
func (p *Pool) openCached(id *opened) (_ *session, err error) {
	root := p.root.Load()
	if root == nil || !id.filesystem.Cached() {
		return nil, errNotCached
	}
	s := p.session(id)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.root, err = dir.OpenCached(p.config.Path); err != nil {
		return nil, err
	}
	// A look has found it to be the root of a filesystem, if it has to be. It still is if
	// something is mounted there.
	here, mounted, err := s.root.IDCached()
	if err != nil || here != *root || p.config.RequireMount && !mounted {
		return nil, cmp.Or(err, errNotCached)
	}
	if s.own, err = s.root.OpenCached(ownName); err != nil {
		return nil, err
	}
	data, err := s.own.ReadCached(formatName, maxFormat)
	if err != nil || !bytes.Equal(data, id.written) {
		return nil, cmp.Or(err, errNotCached)
	}
	s.volumes, err = s.own.OpenCached(volumesName)
	return s, err
}

func (p *Pool) session(id *opened) *session {
	return &session{pool: p, quota: id.quota, unenforced: id.unenforced, claims: id.claims}
}

// openInTime is openSession for callers that the looks at the pool may not have warned yet:
// they, and the volumes that they hold, do not wait for a filesystem that hangs, and those
// that come after them not at all, until a look has told more than st did. What has been
// opened after all is closed by itself.
func (p *Pool) openInTime(id *opened, st *state) (*session, error) {
	type result struct {
		session *session
		err     error
	}
	results, late := make(chan result), make(chan struct{})
	defer close(late)
	go func() {
		s, err := p.openSession(id)
		select {
		case results <- result{s, err}:
		case <-late:
			if err == nil {
				s.close()
			}
		}
	}()
	timer := time.NewTimer(p.options.HangAfter)
	defer timer.Stop()
	select {
	case r := <-results:
		return r.session, r.err
	case <-timer.C:
		p.hung.Store(st)
		return nil, p.hangs()
	}
}

func (p *Pool) openSession(id *opened) (_ *session, err error) {
	s := p.session(id)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.root, err = dir.Open(p.config.Path); err != nil {
		return nil, err
	}
	if err = p.checkMount(s.root); err != nil {
		return nil, err
	}
	if s.own, err = s.root.Open(ownName); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("what is at its path is not the pool that was opened: %w", err)
	} else if err != nil {
		return nil, err
	}
	same, err := s.is(id)
	if err != nil {
		return nil, err
	}
	if !same {
		return nil, errors.New("what is at its path is not the pool that was opened")
	}
	s.volumes, err = s.own.Open(volumesName)
	return s, err
}

// space measures the pool's filesystem.
func (s *session) space() (dir.Space, error) {
	space, err := s.root.Space()
	space.ReadOnly = space.ReadOnly || s.pool.refuses.Load()
	return space, err
}

// feel finds out what statfs(2) does not tell since Linux 6.12: that an error made an ext4
// read-only.
func (s *session) feel() {
	s.pool.refuses.Store(errors.Is(s.root.Sync(), syscall.EROFS))
}

// is tells whether the pool is one that was opened.
func (s *session) is(id *opened) (bool, error) {
	here, err := s.root.On(id.filesystem)
	if err != nil || !here {
		return false, err
	}
	data, err := s.own.ReadFile(formatName, maxFormat)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	// Every call asks. Parsing would cost it more than all the rest of this.
	if err != nil || bytes.Equal(data, id.written) {
		return err == nil, err
	}
	found, err := decodeFormat(data)
	if err != nil {
		return false, fmt.Errorf("%s/%s %w", s.own, formatName, err)
	}
	return found.UUID == id.format.UUID, nil
}

// work opens what only calls that make or remove volumes need.
func (s *session) work() error {
	if s.trash != nil {
		return nil
	}
	err := s.openWork((*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		err = s.openWork((*dir.Dir).Ensure) // removed by hand
	}
	if err != nil {
		return s.pool.unavailable(err)
	}
	return nil
}

// openWork opens the directories of this node by dir.Open, or makes them by
// dir.Ensure.
func (s *session) openWork(get func(*dir.Dir, string) (*dir.Dir, error)) (err error) {
	node := s.pool.options.Node.name
	if s.staging != nil {
		_ = s.staging.Close()
	}
	if s.staging, err = openNested(s.own, stagingName, node, get); err != nil {
		return err
	}
	s.trash, err = openNested(s.own, trashName, node, get)
	return err
}

func openNested(parent *dir.Dir, name, below string, get func(*dir.Dir, string) (*dir.Dir, error)) (*dir.Dir, error) {
	middle, err := get(parent, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = middle.Close() }()
	return get(middle, below)
}

// readFormat answers nil where there is none. It refuses a layout that this
// driver does not know, before anything is changed in it.
func readFormat(own *dir.Dir) (*format, error) {
	data, err := own.ReadFile(formatName, maxFormat)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f, err := decodeFormat(data)
	if err != nil {
		return nil, fmt.Errorf("%s/%s %w", own, formatName, err)
	}
	return f, nil
}

// decodeFormat checks all that later code relies on.
func decodeFormat(data []byte) (*format, error) {
	unreadable := func(err error) (*format, error) {
		return nil, fmt.Errorf("is unreadable, restore it from a backup or remove it: %w", err)
	}
	version, err := versionOf(data)
	if err != nil {
		return unreadable(err)
	}
	if version != formatVersion {
		return nil, fmt.Errorf("has version %d, this driver knows version %d: use the driver that wrote it", version, formatVersion)
	}
	var f format
	if err := json.Unmarshal(data, &f); err != nil {
		return unreadable(err)
	}
	if f.UUID == "" {
		return unreadable(errors.New("it has no uuid"))
	}
	if f.Foreign < 0 || f.Foreign > MaxBytes {
		return unreadable(fmt.Errorf("it has %d foreign bytes", f.Foreign))
	}
	return &f, nil
}

// versionOf reads nothing but the version: what else there is, a newer version may have
// of other types.
func versionOf(data []byte) (int, error) {
	var doc struct {
		Version int `json:"version"`
	}
	err := json.Unmarshal(data, &doc)
	return doc.Version, err
}

// closedMode is what a pool's directory allows at most: volumes have mode 0777,
// and only the closed directory above keeps other users of the node out.
const closedMode = 0o750

// prepare opens a pool for the first time in this process: it makes what is
// missing of the layout.
func (p *Pool) prepare(ctx context.Context) (_ *session, _ *format, err error) {
	s := &session{pool: p}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.root, err = p.openRoot(); err != nil {
		return nil, nil, err
	}
	if s.own, err = s.root.Ensure(ownName); err != nil {
		return nil, nil, err
	}
	// Before the format is known, nothing is changed.
	f, err := s.ensureFormat(ctx)
	if err != nil {
		return nil, nil, err
	}
	s.feel()
	if err := s.closeMode(); err != nil {
		return nil, nil, err
	}
	// A read-only pool whose layout is complete is served for reading.
	if err = s.openLayout((*dir.Dir).Open); errors.Is(err, fs.ErrNotExist) {
		err = s.openLayout((*dir.Dir).Ensure)
	}
	return s, f, err
}

func (s *session) openLayout(get func(*dir.Dir, string) (*dir.Dir, error)) (err error) {
	if s.volumes != nil {
		_ = s.volumes.Close()
	}
	if s.volumes, err = get(s.own, volumesName); err != nil {
		return err
	}
	return s.openWork(get)
}

func (p *Pool) openRoot() (*dir.Dir, error) {
	if !p.config.RequireMount {
		if err := makeClosed(p.config.Path); err != nil {
			return nil, err
		}
	}
	root, err := dir.Open(p.config.Path)
	if err != nil {
		return nil, err
	}
	err = p.checkMount(root)
	if err == nil {
		err = p.checkNested(root)
	}
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

// closeMode takes the permissions away that others than root have.
func (s *session) closeMode() error {
	mode, err := s.root.Mode()
	if err != nil || mode&^closedMode == 0 {
		return err
	}
	space, err := s.space()
	if err != nil || space.ReadOnly {
		return err
	}
	return s.root.Chmod(mode & closedMode)
}

func (s *session) ensureFormat(ctx context.Context) (*format, error) {
	f, err := readFormat(s.own)
	if err != nil || f != nil {
		return f, err
	}
	// The nodes of a shared pool may all be the first.
	unlock, err := s.own.Lock(ctx, lockName)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if f, err := readFormat(s.own); err != nil || f != nil {
		return f, err
	}
	return s.newFormat()
}

func (s *session) newFormat() (*format, error) {
	space, err := s.space()
	if err != nil {
		return nil, err
	}
	f := &format{Version: formatVersion, UUID: randomSuffix(), Foreign: space.TakenBytes(), Created: time.Now().UTC().Truncate(time.Second)}
	data, err := f.encode()
	if err != nil {
		return nil, err
	}
	if err := s.own.WriteFile(formatName, data); err != nil {
		return nil, err
	}
	return f, s.root.Sync()
}

// encode is the file as the driver writes it.
func (f *format) encode() ([]byte, error) {
	data, err := json.Marshal(f)
	return append(data, '\n'), err
}

// lookup reads what the disk has of a volume. The directory, if it is not nil,
// must be closed.
func (s *session) lookup(id VolumeID) (entry, *dir.Dir, error) {
	if id.name == s.pool.reserved {
		return entry{}, nil, nil
	}
	var e entry
	d, err := s.root.Open(id.name)
	switch {
	case isMissing(err):
	case err != nil:
		return entry{}, nil, s.pool.unavailable(err)
	default:
		e.present = true
	}
	e.record, e.damage = readRecord(s.volumes, id)
	return e, d, nil
}
