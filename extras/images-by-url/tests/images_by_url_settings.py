"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {
    "SIE_IMAGE_URL_HOSTS": ("(unset)", "a.example.com,*.example.org:8443,*", (",", "http://a", "a/b", "a:port"))
}
