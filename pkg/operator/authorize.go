package operator

import (
	"net/http"
	"strings"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// Authorize lets those at a handler whose token the API server knows, and who may do there what they ask for, as a rule
// with nonResourceURLs says. The filter of controller-runtime does the same with the API server's own libraries, which
// would be the largest part of the program.
func Authorize(config *rest.Config, client *http.Client) (metricsserver.Filter, error) {
	api, err := kubernetes.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, err
	}
	return func(log logr.Logger, handler http.Handler) (http.Handler, error) {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			switch allowed, known, err := review(api, req); {
			case err != nil:
				log.Error(err, "Failed to ask the API server about a client")
				http.Error(w, "authorization failed", http.StatusInternalServerError)
			case !known:
				http.Error(w, "unauthorized", http.StatusUnauthorized)
			case !allowed:
				http.Error(w, "forbidden", http.StatusForbidden)
			default:
				handler.ServeHTTP(w, req)
			}
		}), nil
	}, nil
}

// review asks the API server whose token a request has, and whether that user may make it.
func review(api kubernetes.Interface, req *http.Request) (allowed, known bool, err error) {
	token, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return false, false, nil
	}
	who, err := api.AuthenticationV1().TokenReviews().Create(req.Context(),
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil || !who.Status.Authenticated {
		return false, false, err
	}
	extra := map[string]authorizationv1.ExtraValue{}
	for key, value := range who.Status.User.Extra {
		extra[key] = authorizationv1.ExtraValue(value)
	}
	may, err := api.AuthorizationV1().SubjectAccessReviews().Create(req.Context(), &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: who.Status.User.Username, UID: who.Status.User.UID, Groups: who.Status.User.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: req.URL.Path, Verb: strings.ToLower(req.Method)},
		},
	}, metav1.CreateOptions{})
	return err == nil && may.Status.Allowed && !may.Status.Denied, true, err
}
