package inspect

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// WriteTable writes the report for people, who read it at the time now. No width of
// a terminal is assumed: a row is a line, and what can be long is last in it.
func (r *Report) WriteTable(w io.Writer, now time.Time) error {
	var text strings.Builder
	for i := range r.Pools {
		r.Pools[i].write(&text, now)
		text.WriteString("\n")
	}
	r.writeOutOfUse(&text)
	if r.NoDevices != "" {
		fmt.Fprintf(&text, "no block volume can be made: %s\n\n", clean(r.NoDevices))
	}
	text.WriteString(r.summary())
	text.WriteString("\n")
	_, err := io.WriteString(w, text.String())
	return err
}

func (r *Report) writeOutOfUse(text *strings.Builder) {
	for _, p := range r.OutOfUse {
		has := counted(len(p.Volumes), "volume")
		if p.Partial {
			has = "at least " + has
		}
		fmt.Fprintf(text, "pool %s at %s: %s\n\n", clean(p.Name), clean(p.Path),
			condition(true, "it is not configured any more, not mounted, or below another mount, and had "+has+", snapshots included: deleting what may be in it is refused"))
	}
	if r.OutOfUseError != "" {
		fmt.Fprintf(text, "%s\n\n", condition(true, r.OutOfUseError))
	}
}

// summary is the last line, which stays in view when the rest has scrolled away.
func (r *Report) summary() string {
	volumes, snapshots, trash := 0, 0, 0
	for _, p := range r.Pools {
		volumes += len(p.Volumes)
		snapshots += len(p.Snapshots)
		trash += len(p.Trash)
	}
	where := ""
	if r.Node != "" {
		where = "node " + clean(r.Node) + ": "
	}
	verdict := "all in order"
	if r.Abnormal > 0 {
		verdict = counted(r.Abnormal, "problem") + ": see the lines with " + abnormalWord
	}
	return fmt.Sprintf("%s%s, %s, %s, %d in the trash; %s", where, counted(len(r.Pools), "pool"), counted(volumes, "volume"), counted(snapshots, "snapshot"), trash, verdict)
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

// abnormalWord marks what is not in order, so that it is found without colours.
const abnormalWord = "ABNORMAL"

func condition(abnormal bool, message string) string {
	// Errors that were joined have a line each.
	message = strings.ReplaceAll(message, "\n", "; ")
	if abnormal {
		return abnormalWord + ": " + clean(message)
	}
	return clean(message)
}

func (p *Pool) write(text *strings.Builder, now time.Time) {
	fmt.Fprintf(text, "pool %s at %s: %s\n", clean(p.Name), clean(p.Path), condition(p.Abnormal, p.Condition))
	if !p.Readable {
		return
	}
	fmt.Fprintf(text, "  %s\n", p.numbers())
	fmt.Fprintf(text, "  %s\n", p.facts())
	if p.DevicesError != "" {
		fmt.Fprintf(text, "  %s\n", condition(true, p.DevicesError))
	}
	if p.SnapshotsError != "" {
		fmt.Fprintf(text, "  %s\n", condition(true, p.SnapshotsError))
	}
	writeTable(text, "", volumeHeader, rows(p.Volumes, Volume.row))
	writeTable(text, "snapshots", snapshotHeader, rows(p.Snapshots, func(s Snapshot) []string { return s.row(now) }))
	writeTable(text, "published", placeHeader, p.places())
	writeTable(text, "on deleted files", orphanHeader, rows(p.OnDeleted, Orphan.row))
	writeTable(text, "creating", leftoverHeader, rows(p.Creating, func(l Leftover) []string { return l.row(now) }))
	writeTable(text, "trash", trashHeader, rows(p.Trash, func(l Leftover) []string { return slices.Insert(l.row(now), 4, size(l.HeldBytes)) }))
}

func (p *Pool) numbers() string {
	line := fmt.Sprintf("size %s, free %s, promised %s, available %s",
		size(p.SizeBytes), size(p.FreeBytes), size(p.PromisedBytes), size(p.AvailableBytes))
	if p.SetAsideBytes != nil && *p.SetAsideBytes > 0 {
		line += ", set aside " + size(p.SetAsideBytes)
	}
	switch {
	case len(p.Trash) > 0 && p.TrashHeldBytes == nil:
		line += ", all used space held for trash of unknown size"
	case len(p.Trash) > 0:
		line += ", held for trash " + size(p.TrashHeldBytes)
	}
	if p.Inodes != nil && p.InodesFree != nil {
		line += fmt.Sprintf(", inodes free %d of %d", *p.InodesFree, *p.Inodes)
	}
	return line
}

func (p *Pool) facts() string {
	var facts []string
	add := func(so bool, format string, args ...any) {
		if so {
			facts = append(facts, fmt.Sprintf(format, args...))
		}
	}
	add(p.Quota != "", "sizes enforced by %s", p.Quota)
	add(p.Quota == "", "sizes not enforced: %s", clean(p.Unenforced))
	if p.Server != nil {
		add(p.Server.Host != "", "served by %s since %s", clean(p.Server.Host), p.Server.Since.Format(time.RFC3339))
	}
	add(p.Shared, "shared with other nodes")
	add(p.ReadOnly, "read-only")
	add(p.SystemDisk, "on the filesystem of the operating system")
	add(len(p.SharesWith) > 0, "on one filesystem with %s: %s", counted(len(p.SharesWith), "other pool"), clean(strings.Join(p.SharesWith, ", ")))
	return strings.Join(facts, "; ")
}

var volumeHeader = []string{"VOLUME", "MODE", "PROMISED", "LIMIT", "USED", "FILE", "ALLOCATED", "EXTENTS", "DEVICES", "CONDITION"}

func (v Volume) row() []string {
	var devices []string
	for _, d := range v.Devices {
		devices = append(devices, d.String())
	}
	return []string{
		clean(v.ID), v.mode(), size(v.PromisedBytes), size(v.LimitBytes), size(v.UsedBytes), size(v.FileBytes), size(v.AllocatedBytes),
		v.extents(), orDash(strings.Join(devices, " ")), condition(v.Abnormal, v.Condition),
	}
}

// extents are the number, and for how long sharing so many is predicted to stop who writes.
func (v Volume) extents() string {
	if v.Extents == nil {
		return "-"
	}
	stall := clone.Stall(*v.Extents).Milliseconds()
	return fmt.Sprintf("%d(%s)", *v.Extents, millis(&stall))
}

func (v Volume) mode() string {
	switch {
	case v.Move != nil && v.Move.Role == string(store.MoveSource):
		return v.Mode + ",to:" + clean(v.Move.Peer)
	case v.Move != nil:
		return v.Mode + ",from:" + clean(v.Move.Peer)
	case v.Inline:
		return v.Mode + ",inline"
	case v.Thin:
		return v.Mode + ",thin"
	}
	return v.Mode
}

func (d Device) String() string {
	name := clean(d.Name)
	if d.ReadOnly {
		name += "(ro)"
	}
	if d.Foreign {
		name += "(foreign)"
	}
	return name
}

var placeHeader = []string{"VOLUME", "AT"}

// places are where the volumes are published, on this node and elsewhere.
func (p *Pool) places() [][]string {
	var places [][]string
	for _, v := range p.Volumes {
		for _, at := range v.Published {
			where := clean(at.Path)
			if at.Inside != "" {
				where += " (" + clean(at.Inside) + " in it)"
			}
			places = append(places, []string{clean(v.ID), where})
		}
		for _, node := range v.Nodes {
			if p.Shared {
				places = append(places, []string{clean(v.ID), "node " + clean(node)})
			}
		}
	}
	return places
}

var orphanHeader = []string{"DEVICE", "FILE", "CONDITION"}

func (o Orphan) row() []string {
	return []string{clean(o.Name), clean(o.File), condition(true, o.Condition)}
}

var (
	leftoverHeader = []string{"NODE", "NAME", "CHANGED", "USED", "CONDITION"}
	trashHeader    = []string{"NODE", "NAME", "CHANGED", "USED", "HELD", "CONDITION"}
)

func (l Leftover) row(now time.Time) []string {
	return []string{clean(l.Node), clean(l.Name), ago(now.Sub(l.Changed)), size(l.UsedBytes), condition(l.Abnormal, l.Condition)}
}

func rows[T any](all []T, row func(T) []string) [][]string {
	var made [][]string
	for _, one := range all {
		made = append(made, row(one))
	}
	return made
}

// writeTable aligns columns. Nothing is written of a table without rows.
func writeTable(text *strings.Builder, title string, header []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	if title != "" {
		fmt.Fprintf(text, "  %s\n", title)
	}
	table := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{header}, rows...) {
		fmt.Fprintln(table, "    "+strings.Join(row, "\t"))
	}
	_ = table.Flush() // to memory
}

// size is a number of bytes in the units of IEC 80000-13.
func size(bytes *int64) string {
	switch {
	case bytes == nil:
		return "-"
	case *bytes < 1<<10:
		return strconv.FormatInt(*bytes, 10) + " B"
	}
	value, unit := float64(*bytes)/(1<<10), 0
	for value >= 1023.95 && unit < len("KMGTPE")-1 {
		value /= 1 << 10
		unit++
	}
	return strconv.FormatFloat(value, 'f', 1, 64) + " " + "KMGTPE"[unit:unit+1] + "iB"
}

// ago is how long something is past, in its largest unit.
func ago(d time.Duration) string {
	switch {
	case d < time.Second:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", d/time.Hour)
	}
	return fmt.Sprintf("%dd ago", d/(24*time.Hour))
}

func orDash(s string) string { return cmp.Or(s, "-") }

// clean makes what others chose harmless to a terminal, and to the lines of a table.
func clean(s string) string {
	unclean := func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }
	if !strings.ContainsFunc(s, unclean) {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}
