package localpv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

const (
	// releasedAgain is how often released volumes are checked, whatever the polling interval is.
	releasedAgain = time.Hour
	// progressEvery is how often the annotation of a volume whose device is being cleaned changes.
	progressEvery = 30 * time.Second
	// pageSize is how many volumes are listed in one request.
	pageSize = 500
	// answer is how long the API server may take for a request.
	answer = 20 * time.Second
)

// A controller has one object to reconcile: its node.
type controller struct {
	Options
	client.Client
	// fresh reads from the API server itself.
	fresh   client.Reader
	agent   *devices.Agent
	events  events.EventRecorder
	metrics *metrics
	watcher *watcher
	log     logr.Logger
	ready   atomic.Bool
	lists   lists

	// What is below belongs to Reconcile, which runs once at a time.
	nextPoll time.Time
	retry    retry
	lastData string
	// compared says that what is reserved for the node is what it has, as of the last poll.
	compared  bool
	reported  map[string]string
	annotated map[string]time.Time
	shown     map[string]bool
}

// Attaching implements devices.API. Kubelet says which volumes its pods have, or will, as soon as it knows of the pods, and the attach/detach
// controller which are attached, as soon as they are.
func (c *controller) Attaching(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	var list corev1.NodeList // to which the rights of the watch extend
	if err := c.fresh.List(ctx, &list, client.MatchingFields{metav1.ObjectNameField: c.Node}); err != nil {
		return "", err
	}
	for n := range list.Items {
		if list.Items[n].Name == c.Node {
			return underway(list.Items[n].Status), nil
		}
	}
	return "", fmt.Errorf("there is no node %s", c.Node)
}

// underway is the first volume that pods have, or will, and that is not attached, or the other way round.
func underway(s corev1.NodeStatus) string {
	attached := make(map[corev1.UniqueVolumeName]bool)
	for _, v := range s.VolumesAttached {
		attached[v.Name] = true
	}
	for _, name := range s.VolumesInUse {
		if !attached[name] {
			return string(name)
		}
	}
	for _, v := range s.VolumesAttached {
		if !slices.Contains(s.VolumesInUse, v.Name) {
			return string(v.Name)
		}
	}
	return ""
}

// Reconcile compares the node's devices with its volumes. It waits for the API, and for no device.
func (c *controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	now := time.Now()
	poll := !now.Before(c.nextPoll)
	if poll {
		c.nextPoll = now.Add(min(c.PollingInterval, releasedAgain))
	}
	result := reconcile.Result{RequeueAfter: time.Until(c.nextPoll) + time.Millisecond}

	node := nodeMetadata(c.Node)
	if err := c.Get(ctx, client.ObjectKey{Name: c.Node}, node); err != nil {
		return result, client.IgnoreNotFound(err)
	}
	var list corev1.PersistentVolumeList
	if err := c.List(ctx, &list, client.MatchingLabels{legacyNodeLabel: c.Node}); err != nil {
		return result, err
	}
	problems := newReports()
	request := devices.Request{Volumes: volumesOf(list.Items), Wipe: devices.WipeSignatures}
	config, named, err := c.config(ctx, node)
	switch {
	case err != nil:
		c.metrics.configIs(invalid)
		c.once("config problems", "The ConfigMap cannot be used", "problems", err.Error())
		problems.add(node, "InvalidPVSpecConfigMap", err.Error())
		if config.DeviceDir != "" {
			c.watcher.watch([]string{nearest(config.DeviceDir)})
		}
		request.Frozen = true
	case named:
		delete(c.reported, "config problems")
		request.Wipe, request.Offer = config.Wipe, c.takesEffect(node, list.Items, &config, problems)
	default:
		c.metrics.configIs("")
	}
	request.Retry = poll || c.changedConfig(config) || c.retry.due(now)
	unknown := c.listReservations(ctx, node, &request, poll)
	report := c.agent.Pass(request)
	if request.Offer != nil {
		c.watcher.watch(report.Directories)
	}
	err = errors.Join(unknown, c.apply(ctx, node, config, list.Items, &report))
	if err != nil {
		c.log.Error(err, "Failed to change the API")
	}
	next := c.retry.next(report.Problems, err != nil, now, c.nextPoll)
	if at := report.Settles; !at.IsZero() && at.Before(next) {
		next = at
	}
	result.RequeueAfter = max(0, time.Until(next)) + time.Millisecond
	c.show(node, list.Items, report, problems)
	if err == nil {
		c.ready.Store(true)
	}
	return result, nil
}

// listReservations has a pass compare what is reserved for the node with what it has: at each poll, and until it is so.
func (c *controller) listReservations(ctx context.Context, node *metav1.PartialObjectMetadata, request *devices.Request, poll bool) (err error) {
	if !poll && (c.compared || !request.Retry) {
		return nil
	}
	request.Reserved, err = c.reservations(ctx, node)
	c.compared = err == nil
	return err
}

// takesEffect is the configuration if devices are to be offered by it, or nil.
func (c *controller) takesEffect(node *metav1.PartialObjectMetadata, pvs []corev1.PersistentVolume, config *devices.Config, problems *reports) *devices.Config {
	different := conflicts(pvs, *config)
	switch {
	case len(different) > 0:
		problems.add(node, "PVSpecConflict", "The configuration takes effect when these PersistentVolumes are gone: "+strings.Join(different, "; "))
	case node.Labels[corev1.LabelHostname] == "":
		problems.add(node, "NoHostnameLabel", "The node has no label "+corev1.LabelHostname+", which PersistentVolumes select it by: nothing is offered")
	default:
		c.metrics.configIs("")
		return config
	}
	c.metrics.configIs(conflict)
	return nil
}

// readyPath is where the kubelet asks, beside the metrics.
const readyPath = "/readyz"

// ServeHTTP reports to kubelet whether devices and volumes have been compared once, which takes all rights and the records.
func (c *controller) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if !c.ready.Load() {
		http.Error(w, "the devices have not been checked successfully yet", http.StatusServiceUnavailable)
	}
}

// config reads the configuration of the node; named is false if there is none.
func (c *controller) config(ctx context.Context, node *metav1.PartialObjectMetadata) (config devices.Config, named bool, err error) {
	name := cmp.Or(node.Annotations[configAnnotation], c.DefaultConfigMap)
	if name == "" {
		c.once("config", "No ConfigMap is named by the node's annotation or by --default-pv-spec-configmap: nothing is offered")
		return config, false, nil
	}
	c.once("config", "Using a ConfigMap", "name", name)
	var data corev1.ConfigMap
	if err := c.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, &data); err != nil {
		return config, true, fmt.Errorf("ConfigMap %s/%s: %w", c.Namespace, name, err)
	}
	config, err = devices.ParseConfig(data.Data)
	if err != nil {
		err = fmt.Errorf("ConfigMap %s/%s: %s", c.Namespace, name, strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return config, true, err
}

func (c *controller) changedConfig(config devices.Config) bool {
	text := fmt.Sprintf("%+v", config)
	changed := text != c.lastData
	c.lastData = text
	return changed
}

// once logs a message about a subject unless it was the last one logged about it.
func (c *controller) once(subject, message string, values ...any) {
	text := message + fmt.Sprint(values...)
	if c.reported[subject] != text {
		c.reported[subject] = text
		c.log.Info(message, values...)
	}
}

// apply changes the API to what was found. Devices that could not be offered are problems then.
func (c *controller) apply(ctx context.Context, node *metav1.PartialObjectMetadata, config devices.Config, pvs []corev1.PersistentVolume, r *devices.Report) error {
	byName := make(map[string]*corev1.PersistentVolume)
	for n := range pvs {
		byName[pvs[n].Name] = &pvs[n]
	}
	failed := []error{c.reserveMissing(ctx, r.NotReserved)}
	for _, name := range r.Cleaned {
		failed = append(failed, c.delete(ctx, byName[name], "is clean and is offered again"))
	}
	for _, name := range r.HalfClean {
		failed = append(failed, c.delete(ctx, byName[name], "is not clean, and no claim may have it"))
	}
	for _, known := range r.Known {
		failed = append(failed, c.update(ctx, byName[known.Name], known))
	}
	for _, o := range r.Offers {
		err := c.offer(ctx, node, config, o)
		if err == nil || errors.Is(err, devices.ErrChanged) {
			continue
		}
		problem, known := errors.AsType[devices.Problem](err)
		if !known {
			problem = devices.Problem{Path: o.Path, Reason: devices.NotOffered, Detail: err.Error()}
		}
		r.Problems = append(r.Problems, problem)
	}
	for _, w := range r.Wiping {
		failed = append(failed, c.annotate(ctx, byName[w.Volume], w.Progress))
	}
	for _, disk := range r.GivenUp {
		failed = append(failed, c.unreserve(ctx, disk, node))
	}
	return errors.Join(failed...)
}

// reserveMissing reserves disks. It does not wait for the answer of an API server that gave none before.
func (c *controller) reserveMissing(ctx context.Context, disks []string) error {
	var failed []error
	for _, disk := range disks {
		err := c.agent.Reserve(ctx, disk)
		failed = append(failed, err)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	err := errors.Join(failed...)
	c.compared = c.compared && err == nil
	return err
}

// update brings the identity and the size of a volume up to date with its device: what its device is has to be known also
// where the node has lost its records, and a device may grow.
func (c *controller) update(ctx context.Context, pv *corev1.PersistentVolume, known devices.Known) error {
	changed := pv.DeepCopy()
	metav1.SetMetaDataAnnotation(&changed.ObjectMeta, identityAnnotation, known.Identity)
	changed.Spec.Capacity[corev1.ResourceStorage] = *resource.NewQuantity(known.Bytes, resource.BinarySI)
	c.metrics.writes.WithLabelValues("patch").Inc()
	err := c.Patch(ctx, changed, client.MergeFromWithOptions(pv, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the next pass has it
	}
	return err
}

// delete deletes a volume for what its device is, if it is still as it was.
func (c *controller) delete(ctx context.Context, pv *corev1.PersistentVolume, device string) error {
	if pv == nil || pv.DeletionTimestamp != nil {
		return nil
	}
	c.metrics.writes.WithLabelValues("delete").Inc()
	err := c.Delete(ctx, pv, client.Preconditions{UID: &pv.UID, ResourceVersion: &pv.ResourceVersion})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the next pass has it
	}
	if err == nil {
		c.log.Info("Deleted a PersistentVolume", "volume", pv.Name, "device", pv.Spec.Local.Path, "because", "the device "+device)
		if released(pv) { // what is half clean has an event of its own
			c.events.Eventf(pv, nil, corev1.EventTypeNormal, "DeviceCleaned", "Clean", "%s %s", pv.Spec.Local.Path, device)
		}
	}
	return err
}

// offer makes a volume of a device that is held until then.
func (c *controller) offer(ctx context.Context, node *metav1.PartialObjectMetadata, config devices.Config, o devices.Offer) error {
	if err := c.agent.Offering(ctx, o); err != nil {
		return errors.Join(err, c.agent.Offered(o, "", err))
	}
	c.metrics.writes.WithLabelValues("create").Inc()
	pv := newVolume(node, config, o)
	err := c.Create(ctx, pv)
	if err == nil {
		c.log.Info("Made a PersistentVolume", "volume", o.Name, "device", o.Path, "bytes", o.Bytes)
	}
	return errors.Join(err, c.agent.Offered(o, string(pv.UID), err))
}

func (c *controller) annotate(ctx context.Context, pv *corev1.PersistentVolume, p devices.Progress) error {
	if pv == nil || p.Total == 0 {
		return nil
	}
	last, known := c.annotated[pv.Name]
	if !known {
		c.annotated[pv.Name] = time.Now() // a short one needs none
		return nil
	}
	if time.Since(last) < progressEvery || pv.Annotations[progressAnnotation] == p.String() {
		return nil
	}
	c.annotated[pv.Name] = time.Now()
	c.metrics.writes.WithLabelValues("patch").Inc()
	changed := pv.DeepCopy()
	metav1.SetMetaDataAnnotation(&changed.ObjectMeta, progressAnnotation, p.String())
	return client.IgnoreNotFound(c.Patch(ctx, changed, client.MergeFrom(pv)))
}

func (c *controller) show(node *metav1.PartialObjectMetadata, pvs []corev1.PersistentVolume, r devices.Report, reports *reports) {
	found := devices.SortProblems(r.Problems)
	missing := 0
	for _, p := range found {
		c.once("device "+p.Path+p.Volume, "A device cannot be used", "device", p.Path, "volume", p.Volume, "reason", p.Reason, "detail", p.Detail)
		if p.Volume == "" {
			reports.add(node, "Device"+string(p.Reason), p.Error())
			continue
		}
		if p.Reason == devices.Gone {
			missing++
		}
		for n := range pvs {
			if pvs[n].Name == p.Volume {
				reports.add(&pvs[n], "Device"+string(p.Reason), p.Error())
			}
		}
	}
	c.report(reports)
	c.metrics.available.Set(float64(r.Available))
	used := slices.DeleteFunc(slices.Clone(found), func(p devices.Problem) bool { return !p.UsedByNode() })
	c.metrics.errors.Set(float64(len(found) - len(used)))
	c.metrics.used.Set(float64(len(used)))
	c.metrics.missing.Set(float64(missing))
	c.metrics.wiping.Set(float64(len(r.Wiping)))
	c.metrics.uncleaned.Set(float64(uncleaned(pvs, r)))
	shown := make(map[string]bool)
	for _, w := range r.Wiping {
		if w.Progress.Total > 0 {
			shown[w.Path] = true
			c.metrics.progress.WithLabelValues(w.Path).Set(float64(w.Progress.Done) / float64(w.Progress.Total))
		}
	}
	for path := range c.shown {
		if !shown[path] {
			c.metrics.progress.DeleteLabelValues(path)
		}
	}
	c.shown = shown
}

// uncleaned counts the released volumes whose device is neither clean nor being cleaned.
func uncleaned(pvs []corev1.PersistentVolume, r devices.Report) (n int) {
	underway := make(map[string]bool)
	for _, name := range r.Cleaned {
		underway[name] = true
	}
	for _, w := range r.Wiping {
		underway[w.Volume] = true
	}
	for _, v := range volumesOf(pvs) {
		if v.Released && !underway[v.Name] {
			n++
		}
	}
	return n
}

type reports struct {
	objects map[string]client.Object
	texts   map[string]string
}

func newReports() *reports {
	return &reports{make(map[string]client.Object), make(map[string]string)}
}

func (r *reports) add(about client.Object, reason, text string) {
	key := "event " + about.GetName() + " " + reason
	if before := r.texts[key]; before != "" {
		text = before + "; " + text
	}
	r.objects[key], r.texts[key] = about, text
}

// longestNote is the longest note of an event, in bytes (events.k8s.io/v1, note).
const longestNote = 1000

// report makes events of what was not reported before. What is not the case any more can be reported again.
func (c *controller) report(r *reports) {
	for key, text := range r.texts {
		if c.reported[key] == text {
			continue
		}
		c.reported[key] = text
		reason := key[strings.LastIndex(key, " ")+1:]
		if len(text) > longestNote {
			text = text[:longestNote] + "..."
		}
		c.events.Eventf(r.objects[key], nil, corev1.EventTypeWarning, reason, "Check", "%s", text)
	}
	for key := range c.reported {
		if _, now := r.texts[key]; strings.HasPrefix(key, "event ") && !now {
			delete(c.reported, key)
		}
	}
}
